"""Each layout: which rank owns which tokens, at any length and any number of ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.layouts import LAYOUTS, Layout
from ringspan.layouts.round_robin import BLOCKS_PER_RANK
from tests.hypothesis_strategies import Drawn, masks

worlds = st.integers(1, 9)

# The largest difference of token counts: one token, one for each of a rank's two chunks, or one for each of its blocks.
SPREAD = {"contiguous": 1, "zigzag": 2, "striped": 1, "per_document": 2, "round_robin": BLOCKS_PER_RANK, "balanced": 1}


@pytest.mark.parametrize("name", LAYOUTS)
@given(drawn=masks(60, square=True, leaves=3), world=worlds)
def test_every_token_has_one_owner_and_shares_are_even(name: str, drawn: Drawn, world: int) -> None:
    layout = LAYOUTS[name](drawn.mask, world)
    n = drawn.mask.lengths[0]
    held = [layout.positions(rank) for rank in range(world)]
    assert (layout.world, layout.length, layout.name) == (world, n, name)
    assert sorted(np.concatenate(held).tolist()) == list(range(n))
    assert max(layout.counts) - min(layout.counts) <= SPREAD[name]


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {"per_document"}))
@given(drawn=masks(30, leaves=3), world=worlds)
def test_queries_alone_decide_when_keys_differ(name: str, drawn: Drawn, world: int) -> None:
    assert LAYOUTS[name](drawn.mask, world).length == drawn.mask.lengths[0]


PICTURES = [
    ("contiguous", rs.full(10), 4, "[0,2) / [2,5) / [5,7) / [7,10)"),
    ("contiguous", rs.full(2), 3, " / [0,1) / [1,2)"),
    ("zigzag", rs.causal(8), 2, "[0,2) [6,8) / [2,4) [4,6)"),
    ("zigzag", rs.causal(3), 2, "[2,3) / [0,1) [1,2)"),
    ("striped", rs.causal(7), 3, "[0,7):3 / [1,7):3 / [2,7):3"),
    ("striped", rs.causal(2), 3, "[0,2):3 / [1,2):3 / "),
    ("per_document", rs.documents([4, 4]), 2, "[0,1) [3,4) [4,5) [7,8) / [1,2) [2,3) [5,6) [6,7)"),
    ("per_document", rs.documents([2, 6]), 2, "[0,1) [2,3) [6,8) / [1,2) [3,4) [4,6)"),
    ("round_robin", rs.causal(8), 2, "[0,1) [3,5) [7,8) / [1,3) [5,7)"),
    ("round_robin", rs.full(0), 2, " / "),
    ("balanced", rs.causal(8), 2, "[0,2) [6,8) / [2,6)"),
    ("balanced", rs.full(10), 4, "[0,2) / [2,4) / [4,7) / [7,10)"),
    ("balanced", rs.full(2), 3, " / [0,1) / [1,2)"),
    ("balanced", rs.documents([4, 2, 4, 2]), 2, "[0,4) [10,12) / [6,10) [4,6)"),
]


@pytest.mark.parametrize(("name", "mask", "world", "picture"), PICTURES)
def test_picture(name: str, mask: rs.Mask, world: int, picture: str) -> None:
    layout = LAYOUTS[name](mask, world)
    assert " / ".join(" ".join(map(repr, spans)) for spans in layout.spans) == picture


@given(masks(60, square=True, leaves=3), worlds)
def test_per_document_zigzags_within_each_document(drawn: Drawn, world: int) -> None:
    """Through a document the owners rise and fall again, as in 0 0 1 1 2 2 1 1 0, with two chunks of even size for
    each."""
    layout = LAYOUTS["per_document"](drawn.mask, world)
    owner = np.empty(layout.length, dtype=np.int64)
    for rank in range(world):
        owner[layout.positions(rank)] = rank
    cuts = drawn.mask.documents()
    for low, high in pairwise(cuts):
        turns = np.sign(np.diff(owner[low:high]))
        assert (np.diff(turns[turns != 0]) <= 0).all(), owner[low:high]
        beyond_even = np.bincount(owner[low:high], minlength=world) - 2 * ((high - low) // (2 * world))
        assert set(beyond_even.tolist()) <= {0, 1, 2}


@given(masks(60, square=True, leaves=3), worlds)
def test_round_robin_assigns_the_heaviest_blocks_first(drawn: Drawn, world: int) -> None:
    """Compared with a loop over single blocks."""
    n = drawn.mask.lengths[0]
    blocks = max(1, min(n, BLOCKS_PER_RANK * world))
    cuts = [i * n // blocks for i in range(blocks + 1)]
    work = [int(drawn.truth[low:high].sum()) for low, high in pairwise(cuts)]
    to_and_fro = [*range(world), *reversed(range(world))]
    owner = {}
    for turn, block in enumerate(sorted(range(blocks), key=lambda b: (-work[b], b))):
        owner[block] = to_and_fro[turn % len(to_and_fro)]
    expected = [[t for b in range(blocks) if owner[b] == rank for t in range(cuts[b], cuts[b + 1])] for rank in range(world)]
    layout = LAYOUTS["round_robin"](drawn.mask, world)
    assert [layout.positions(rank).tolist() for rank in range(world)] == expected


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world", [1, 8, 100])
def test_a_million_tokens_cost_no_more_than_their_spans(name: str, world: int) -> None:
    layout: Layout = LAYOUTS[name](rs.documents([1000] * 1000), world)
    assert layout.length == 10**6
    documents = 1000 if name == "per_document" else 1
    assert sum(map(len, layout.spans)) <= max(2 * documents, BLOCKS_PER_RANK) * world
