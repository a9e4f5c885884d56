"""Masks, layouts and strategies for the tests of plans, and all plans of a world."""

from __future__ import annotations

import ringspan as rs
from ringspan.layouts import LAYOUTS as BUILT_IN_LAYOUTS
from ringspan.masks import Mask
from ringspan.planner import Plan
from ringspan.strategies import STRATEGIES as BUILT_IN

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

LAYOUTS = (*BUILT_IN_LAYOUTS, "auto")

# Options of the strategies to test, where the defaults are not enough. A strategy that is not listed has its defaults.
OPTIONS = {
    "gather": ("", "stages=3"),
    "exchange": ("", "stages=1"),
    "pass_q": ("", "stages=1"),
    "ulysses": ("heads=6, kv_heads=3",),
    "hierarchical": ("per_node=2", "per_node=3", "per_node=2, pieces=3"),
    "hybrid": ("per_node=1, heads=6, kv_heads=3",),  # fits any number of ranks; test_strategies.py has other nodes
}
STRATEGIES = (
    *(f"{name}({options})" if options else name for name in BUILT_IN for options in OPTIONS.get(name, ("",))),
    "auto",
)


def layouts_for(mask: Mask) -> tuple[str, ...]:
    """per_document needs queries and keys of one length."""
    q_len, k_len = mask.lengths
    return tuple(name for name in LAYOUTS if q_len == k_len or name != "per_document")


def all_plans(mask: Mask, world: int, strategy: str = "auto", layout: object = "auto") -> list[Plan]:
    first = rs.plan(mask, world=world, strategy=strategy, layout=layout)  # type: ignore[arg-type]
    return [first.at(rank) for rank in range(world)]
