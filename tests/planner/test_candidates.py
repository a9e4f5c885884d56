"""The layouts and strategies that are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ringspan as rs
from ringspan.costs import HARDWARE, Hardware, Speed
from ringspan.layouts import named_layout
from ringspan.planner import best_on
from ringspan.planner.candidates import MAX_RANKS_BALANCED as MANY
from ringspan.planner.candidates import layouts_for, strategies_for
from tests.plans.machines import LAPTOP, SLOW

H200 = HARDWARE["h200"]
SLOW_IN_WINDOWS = replace(SLOW, forward=Speed(full=4.0, causal=4.0, window=1.0))
SHAPE = rs.Shape(heads=8, kv_heads=4, head_dim=64)

EVEN, ZIGZAG = ["contiguous"], ["contiguous", "zigzag"]
LAYOUTS: list[tuple[rs.Mask, int, Hardware, list[str]]] = [
    # all are even, and each rank fetches the keys of all others
    (rs.full(64), 4, H200, EVEN),
    # zigzag is even, contiguous fetches less
    (rs.causal(64), 4, H200, ZIGZAG),
    # windows are cut into triangles and rectangles, where that is faster and there are any
    (rs.full(64), 4, SLOW_IN_WINDOWS, EVEN),
    (rs.causal(64), 4, SLOW_IN_WINDOWS, ZIGZAG),
    (rs.full(2048) & rs.window(left=256, right=256), 2, H200, EVEN),
    (rs.full(2048) & rs.window(left=256, right=256), 2, LAPTOP, ["contiguous", "round_robin"]),
    # zigzag is faster than round_robin, and fetches less
    (rs.documents([1638, 2730, 2048, 1776]) & rs.window(left=300), 2, LAPTOP, ZIGZAG),
    # documents of one length are balanced in a contiguous layout
    (rs.documents([16] * 8), 4, H200, EVEN),
    (rs.documents([900, 3000, 100, 96]), 4, H200, ["contiguous", "zigzag", "balanced", "per_document"]),
    # more documents than are worth planning in two pieces for each rank, and the most that are
    (rs.documents([200 + 7 * (i % 9) for i in range(9)]), 64, H200, [*ZIGZAG, "balanced(per_node=8)"]),
    (rs.documents([200 + 7 * (i % 9) for i in range(8)]), 64, H200, [*ZIGZAG, "balanced(per_node=8)", "per_document"]),
    # round_robin gives a rank unequal numbers of tokens, and the rows of a batch need equal ones
    (
        rs.documents([[177, 59, 10, 9], [255], [166, 47, 42]]) & rs.window(left=30),
        5,
        LAPTOP,
        ["contiguous", "balanced(per_node=4)"],
    ),
    (rs.per_row([rs.prefix(8 * MANY, 3 * MANY), rs.causal(8 * MANY)]), 2 * MANY, H200, ZIGZAG),
    (rs.causal(8 * MANY), 2 * MANY, H200, ZIGZAG),
    (
        rs.prefix(8 * MANY, 3 * MANY),
        2 * MANY,
        H200,
        ["contiguous", "zigzag", "round_robin"],
    ),
]


@pytest.mark.parametrize(("mask", "world", "machine", "names"), LAYOUTS)
def test_layouts_that_are_compared(mask: rs.Mask, world: int, machine: Hardware, names: list[str]) -> None:
    assert [layout.name for layout in layouts_for(mask, world, machine, SHAPE)] == names


@pytest.mark.parametrize(("of_keys", "names"), [("contiguous", EVEN), ("zigzag", ZIGZAG)])
def test_the_layout_of_the_keys_counts(of_keys: str, names: list[str]) -> None:
    """Two documents to a rank: nothing is fetched by queries that lie where their keys do."""
    mask = rs.documents([16] * 8)
    kv_layout, _ = named_layout(of_keys, mask, 4)
    assert [layout.name for layout in layouts_for(mask, 4, H200, SHAPE, kv_layout)] == names
    assert best_on(mask, world=4, hardware=H200, shape=SHAPE, kv_layout=kv_layout).best.layout.name == of_keys


@pytest.mark.parametrize(
    ("world", "per_node", "more"),
    [
        (8, 8, ["ulysses"]),
        (9, 9, []),  # more ranks than heads
        (8, 4, ["ulysses", "hierarchical", "hybrid"]),
        (33, 2, ["hierarchical", "hierarchical"]),  # in one piece, and over many nodes in several
        (9, 4, ["hierarchical"]),  # nodes of different sizes
        (8, 1, ["ulysses", "hierarchical"]),
    ],
)
def test_strategies_that_the_machine_and_the_heads_allow(world: int, per_node: int, more: list[str]) -> None:
    found = [name.partition("(")[0] for name in strategies_for(world, replace(H200, per_node=per_node), SHAPE)]
    assert found == ["exchange", "exchange", "ring", "gather", *more, "pass_q"]


def test_no_heads_are_split_if_there_are_none() -> None:
    none, nodes_of_2 = rs.Shape(heads=0, kv_heads=4, head_dim=64), replace(H200, per_node=2)
    found = best_on(rs.causal(64), world=4, hardware=nodes_of_2, shape=none)
    assert not {"ulysses", "hybrid"} & {c.strategy.partition("(")[0] for c in found.candidates}
    for strategy in ("ulysses", "hybrid(per_node=2)"):
        with pytest.raises(rs.PlanError, match="at least 1; got heads=0, kv_heads=4"):
            best_on(rs.causal(64), world=4, hardware=nodes_of_2, shape=none, strategy=strategy)


def test_one_rank_has_one_candidate() -> None:
    assert strategies_for(1, H200, SHAPE) == ["gather(stages=1)"]
