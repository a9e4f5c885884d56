"""Make the program of one rank for given layouts and a given strategy."""

from __future__ import annotations

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts import Layout
from ringspan.masks import Mask
from ringspan.plans.data import Program
from ringspan.plans.problem import Problem
from ringspan.strategies.registry import BY_STRATEGY_NAME, parse_strategy


def _bytes_of(made: object) -> int:
    # A user's strategy may return something else, which the plan refuses.
    return made.approximate_bytes if isinstance(made, Program) else 0


@cache_by_digest(512, group=BY_STRATEGY_NAME, bytes_of=_bytes_of)
def make_program(mask: Mask, q_layout: Layout, kv_layout: Layout, strategy: str, rank: int) -> Program:
    """Make the program of a rank. Cached by the digests of mask and layouts.

    A program holds bands, never the mask, so the cache keeps no tensor alive that a mask's function has captured.
    """
    return parse_strategy(strategy)(Problem(mask=mask, q_layout=q_layout, kv_layout=kv_layout, rank=rank))
