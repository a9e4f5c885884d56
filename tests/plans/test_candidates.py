"""What is looked at, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ringspan as rs
from ringspan.plans import HARDWARE, Hardware, Speed
from ringspan.plans.candidates import MANY_RANKS, layouts_for, strategies_for
from tests.plans.machines import SLOW

H200 = HARDWARE["h200"]
SLOW_IN_WINDOWS = replace(SLOW, forward=Speed(full=4.0, causal=4.0, window=1.0))
SHAPE = rs.Shape(heads=8, kv_heads=4, head_dim=64)

EVEN, ZIGZAG = ["contiguous"], ["contiguous", "zigzag"]
LAYOUTS: list[tuple[rs.Mask, int, Hardware, list[str]]] = [
    # all are even, and each rank fetches the keys of all others
    (rs.full(64), 4, H200, EVEN),
    # zigzag is even, contiguous fetches less
    (rs.causal(64), 4, H200, ZIGZAG),
    (rs.full(64), 4, SLOW_IN_WINDOWS, ["contiguous", "round_robin"]),
    # documents of one length are even as they lie
    (rs.documents([16] * 8), 4, H200, EVEN),
    (rs.documents([900, 3000, 100, 96]), 4, H200, ["contiguous", "zigzag", "balanced", "per_document"]),
    (rs.causal(8 * MANY_RANKS), 2 * MANY_RANKS, H200, ZIGZAG),
    (rs.prefix(8 * MANY_RANKS, 3 * MANY_RANKS), 2 * MANY_RANKS, H200, ["contiguous", "zigzag", "round_robin"]),
]


@pytest.mark.parametrize(("mask", "world", "machine", "names"), LAYOUTS)
def test_a_layout_that_asks_for_more_is_not_looked_at(mask: rs.Mask, world: int, machine: Hardware, names: list[str]) -> None:
    assert [layout.name for layout in layouts_for(mask, world, machine)] == names


@pytest.mark.parametrize(
    ("world", "per_node", "more"),
    [
        (8, 8, ["ulysses"]),
        (9, 9, []),  # more ranks than heads
        (8, 4, ["ulysses", "hierarchical", "hybrid"]),
        (9, 4, ["hierarchical"]),  # nodes of different sizes
        (8, 1, ["ulysses", "hierarchical"]),
    ],
)
def test_strategies_that_the_machine_and_the_heads_allow(world: int, per_node: int, more: list[str]) -> None:
    found = [name.partition("(")[0] for name in strategies_for(world, replace(H200, per_node=per_node), SHAPE)]
    assert found == ["exchange", "exchange", "ring", "gather", *more, "pass_q"]


def test_one_rank_has_nothing_to_exchange() -> None:
    assert strategies_for(1, H200, SHAPE) == ["gather(stages=1)"]
