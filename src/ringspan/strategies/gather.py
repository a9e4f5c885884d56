"""Gather: every rank receives all keys, at once or in stages. The simplest plan, and the most memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspan.plans.data import Program
from ringspan.plans.moving_side import KEYS, RowRanges
from ringspan.plans.problem import Problem
from ringspan.strategies.staged import check_stages, staged


@dataclass(frozen=True, slots=True)
class Gather:
    """All keys, whether seen or not. One stage lets one launch cover them all; more stages hide the wire behind computing."""

    stages: int = 1

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def __call__(self, problem: Problem) -> Program:
        ranks = np.arange(problem.world)
        rows = np.array(problem.kv_layout.counts, dtype=np.int64)
        others = ranks[(ranks != problem.rank) & (rows > 0)]
        askers = ranks[(ranks != problem.rank) & (rows[problem.rank] > 0)]
        here = np.full_like(ranks, problem.rank)
        incoming = RowRanges(others, here[others], np.zeros_like(others), rows[others])
        outgoing = RowRanges(here[askers], askers, np.zeros_like(askers), rows[here[askers]])
        return staged(problem, KEYS, problem.seen(), incoming, outgoing, self.stages)
