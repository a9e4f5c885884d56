"""Masks, layouts and strategies for the tests of plans, and all plans of a world."""

from __future__ import annotations

import ringspan as rs
from ringspan.masks import Mask
from ringspan.planner import Plan

MASKS: dict[str, Mask] = {
    "full": rs.full(24),
    "causal": rs.causal(25),
    "window": rs.causal(24) & rs.window(left=5),
    "documents": rs.documents([7, 1, 0, 9, 6]),
    "ids": rs.documents(ids=[0, 0, 1, 1, 1, 0, 2, 2, 0, 1, 1, 2], causal=False),
    "hole": rs.causal(19) - rs.chunked(19, 4),
    "cross": rs.documents([3, 8, 2], kv_lengths=[5, 2, 9], align="end"),
    "nothing": rs.causal(6) & ~rs.causal(6),
    "one token": rs.full(1),
}

LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "round_robin", "balanced", "auto")
STRATEGIES = (
    "ring",
    "gather",
    "gather(stages=3)",
    "exchange(stages=1)",
    "exchange",
    "pass_q(stages=1)",
    "pass_q",
    "ulysses(heads=6, kv_heads=3)",
    "hierarchical(per_node=2)",
    "hierarchical(per_node=3)",
    "auto",
)


def layouts_for(mask: Mask) -> tuple[str, ...]:
    """per_document needs queries and keys of one length."""
    q_len, k_len = mask.lengths
    return tuple(name for name in LAYOUTS if q_len == k_len or name != "per_document")


def all_plans(mask: Mask, world: int, strategy: str = "auto", layout: object = "auto") -> list[Plan]:
    first = rs.plan(mask, world=world, strategy=strategy, layout=layout)  # type: ignore[arg-type]
    return [first.at(rank) for rank in range(world)]
