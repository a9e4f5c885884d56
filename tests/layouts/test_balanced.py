"""The balanced layout: equal tokens and work for every mask, with few pieces and few keys to fetch."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.bench.layouts import LENGTHS, draw_lengths, fewest_rows
from ringspan.errors import LayoutError
from ringspan.layouts import LAYOUTS, Layout, areas, balance, balanced
from ringspan.plans import needed_rows
from tests import dense_masks
from tests.hypothesis_strategies import Drawn, masks

worlds = st.integers(1, 9)


def spread(layout: Layout) -> int:
    return max(layout.counts) - min(layout.counts)


@given(masks(60, leaves=3), worlds, st.integers(1, 20))
def test_even_tokens(drawn: Drawn, world: int, block: int) -> None:
    layout = balanced(drawn.mask, world, block=block)
    assert (layout.world, layout.length, layout.name) == (world, drawn.mask.lengths[0], "balanced")
    assert spread(layout) <= 1


@example(Drawn(rs.causal(10), dense_masks.causal(10, 10)), 3)  # here intervals alone would give 22 pairs where zigzag has 20
@example(Drawn(rs.causal(9), dense_masks.causal(9, 9)), 6)
@given(masks(60, square=True, leaves=3), worlds)
def test_never_worse_balanced_than_the_simple_layouts(drawn: Drawn, world: int) -> None:
    simple = [LAYOUTS[name](drawn.mask, world) for name in ("contiguous", "zigzag")]
    largest = [int(areas(drawn.mask, layout).max()) for layout in simple if spread(layout) <= 1]
    assert areas(drawn.mask, balanced(drawn.mask, world)).max() <= min(largest)


@given(masks(60, square=True, leaves=3), worlds, st.integers(0, 8))
def test_slack_bounds_the_token_counts(drawn: Drawn, world: int, slack: int) -> None:
    n, layout = drawn.mask.lengths[0], balanced(drawn.mask, world, slack=slack)
    assert min(layout.counts) >= n // world - slack
    assert max(layout.counts) <= -(-n // world) + slack


def test_slack_saves_cuts() -> None:
    """Documents that nearly fill a rank each stay whole once the counts may differ by as much as they do."""
    mask = rs.documents([1000, 1004, 996, 1002])
    assert moved(mask, balanced(mask, 4)) > 0
    assert balanced(mask, 4, slack=5).spans == (((0, 1000, 1),), ((1000, 2004, 1),), ((2004, 3000, 1),), ((3000, 4002, 1),))


@pytest.mark.parametrize("world", [8, 32, 128])
@pytest.mark.parametrize("kind", LENGTHS)
def test_documents_of_many_kinds(kind: str, world: int) -> None:
    """Even to 2% everywhere, with at most two cuts a rank, and far fewer keys to fetch than other layouts that are as
    even."""
    made = draw_lengths(kind, documents=128, tokens=131072, seed=0)
    mask = rs.documents(made)
    layout, others = balanced(mask, world), [LAYOUTS[name](mask, world) for name in ("per_document", "round_robin")]
    assert balance(mask, layout) <= 1.02
    assert sum(map(len, layout.spans)) <= 128 + 2 * world
    rows = moved(mask, layout)
    assert rows < min(moved(mask, other) for other in others)
    bound = fewest_rows(made, world, 1.02)
    assert bound <= rows <= 2.2 * bound + 10_000


def moved(mask: rs.Mask, layout: Layout) -> int:
    needed = needed_rows(mask, layout, layout)
    return int(needed.sum() - needed.trace())


def test_a_million_tokens() -> None:
    mask = rs.documents(draw_lengths("zipf", documents=1000, tokens=1_048_576, seed=0))
    assert balance(mask, balanced(mask, 128)) <= 1.02


@pytest.mark.parametrize("n", [2**31 - 1, 10**9])
def test_the_longest_sequences(n: int) -> None:
    """Products of work and tokens would not fit int64."""
    for mask in (rs.causal(n), rs.documents([n // 3, n - n // 3]) & rs.window(left=n // 7)):
        layout = balanced(mask, 5)
        assert spread(layout) <= 1
        assert balance(mask, layout) <= 1.02


# -- nodes -------------------------------------------------------------------------------------------------------------


@given(masks(60, square=True, leaves=3), worlds, st.integers(1, 4))
def test_nodes_share_tokens_and_work_too(drawn: Drawn, world: int, per_node: int) -> None:
    layout = balanced(drawn.mask, world, per_node=per_node)
    assert (layout.world, layout.length) == (world, drawn.mask.lengths[0])
    assert spread(layout) <= 1
    simple = [LAYOUTS[name](drawn.mask, world) for name in ("contiguous", "zigzag")]
    largest = [int(areas(drawn.mask, layout).max()) for layout in simple if spread(layout) <= 1]
    fair = drawn.mask.area // world
    assert areas(drawn.mask, layout).max() <= max(fair + max(fair // 55, 1), min(largest))


@pytest.mark.parametrize("kind", LENGTHS)
def test_few_keys_cross_nodes(kind: str) -> None:
    """Each key is counted once for each node that needs it. With nodes it is never more than without."""
    mask = rs.documents(draw_lengths(kind, documents=512, tokens=524_288, seed=0))
    without, layout = balanced(mask, 64), balanced(mask, 64, per_node=8)
    assert layout.name == "balanced(per_node=8)"
    assert balance(mask, layout) <= 1.02
    assert crossing(mask, layout) <= crossing(mask, without)


def test_how_many_fewer_keys_cross_nodes() -> None:
    share = np.random.default_rng(0).lognormal(size=1000)
    cuts = np.round(np.cumsum(share) / share.sum() * 2**20).astype(int)
    mask = rs.documents(np.diff(np.concatenate([[0], cuts])))
    assert crossing(mask, balanced(mask, 64)) >= 4 * crossing(mask, balanced(mask, 64, per_node=8))


def crossing(mask: rs.Mask, layout: Layout) -> int:
    """The keys that nodes of 8 ranks receive from other nodes, once each."""
    spans = [[span for of_rank in layout.spans[i : i + 8] for span in of_rank] for i in range(0, layout.world, 8)]
    return moved(mask, Layout(spans))


def test_nodes_are_those_of_the_machine() -> None:
    mask = rs.documents(range(1, 90))
    with_nodes = balanced(mask, 16, per_node=8)
    assert rs.plan(mask, world=16, layout="balanced", strategy="exchange", hardware="h200x8").q_layout == with_nodes
    assert rs.plan(mask, world=16, layout="balanced(per_node=8)", strategy="exchange").q_layout == with_nodes
    assert rs.plan(mask, world=16, layout="balanced", strategy="exchange").q_layout == balanced(mask, 16)
    assert balanced(mask, 8, per_node=8) == balanced(mask, 8)
    with pytest.raises(LayoutError, match=r"cannot read layout \'zigzag\(per_node=8\)\': zigzag takes no options"):
        rs.plan(mask, world=16, layout="zigzag(per_node=8)", strategy="exchange")


@pytest.mark.alone
def test_nodes_are_solved_in_half_a_second() -> None:
    mask = rs.documents(draw_lengths("log-normal-1", documents=1000, tokens=1_048_576, seed=0))
    seconds = []
    for _ in range(3):
        start = time.process_time()  # other processes may run at the same time
        layout = balanced(mask, 128, per_node=8)
        seconds.append(time.process_time() - start)
    assert balance(mask, layout) <= 1.02
    assert min(seconds) <= 0.5


BAD: list[tuple[dict[str, Any], str]] = [
    ({"block": 0}, "balanced: block must be an integer number of tokens, at least 1; got 0"),
    ({"block": 1.5}, "block must be .* got 1.5"),
    ({"slack": -1}, "slack must be an integer number of tokens, at least 0; got -1"),
    ({"slack": None}, "slack must be .* got None"),
    ({"per_node": 0}, "per_node must be an integer number of .*, at least 1; got 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(options) for options, _ in BAD])
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        balanced(rs.causal(8), 2, **options)


def test_every_process_computes_the_same_layout() -> None:
    """Also with another hash seed."""
    code = "import ringspan as rs; from ringspan.layouts import balanced; print(balanced(rs.documents(range(1, 90)), 7).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "src"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {balanced(rs.documents(range(1, 90)), 7).digest + "\n"}
