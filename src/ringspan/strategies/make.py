"""The plan of one rank with everything chosen. A repeated call is a dictionary look-up."""

from __future__ import annotations

from dataclasses import replace

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts import Layout
from ringspan.masks import Mask
from ringspan.plans.data import Plan, Program
from ringspan.plans.problem import Scene
from ringspan.strategies.registry import parse_strategy


def plan_rank(mask: Mask, q_layout: Layout, kv_layout: Layout, strategy: str, rank: int, notes: tuple[str, ...] = ()) -> Plan:
    made = _plan(mask, q_layout, kv_layout, strategy, rank, notes)
    # Of masks that say the same one is as good as another, but not their functions: these have tensors, on a device, of today.
    return made if mask.settler is None or made.mask is mask else replace(made, mask=mask)


@cache_by_digest(512)
def _plan(mask: Mask, q_layout: Layout, kv_layout: Layout, strategy: str, rank: int, notes: tuple[str, ...]) -> Plan:
    program = _program(mask, q_layout, kv_layout, strategy, rank)
    return Plan(mask=mask, q_layout=q_layout, kv_layout=kv_layout, strategy=strategy, rank=rank, program=program, notes=notes)


@cache_by_digest(512)
def _program(mask: Mask, q_layout: Layout, kv_layout: Layout, strategy: str, rank: int) -> Program:
    """Apart from the notes: what was planned to be costed is not planned again once it is chosen."""
    return parse_strategy(strategy)(Scene(mask=mask, q_layout=q_layout, kv_layout=kv_layout, rank=rank))
