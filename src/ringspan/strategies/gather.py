"""Gather: every rank receives all keys, at once or in stages. The plan is the simplest, but takes the most memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.timeline import Loads
from ringspan.costs.workload import Workload
from ringspan.plans.columns import ProgramColumns
from ringspan.plans.data import Phase, Program
from ringspan.plans.moving_side import KEYS, RowRanges
from ringspan.plans.problem import Problem
from ringspan.plans.shape import Shape
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.staged import check_stages, staged
from ringspan.strategies.staged_columns import staged_columns
from ringspan.strategies.staged_loads import staged_loads
from ringspan.strategies.transfer_bound import receiving_seconds


@dataclass(frozen=True, slots=True)
class Gather(Strategy):
    """Send all keys, visible or not. With one stage a single launch covers them. More stages overlap communication with
    computing."""

    stages: int = 1

    moving_side = KEYS

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def __call__(self, problem: Problem) -> Program:
        ranks = np.arange(problem.world)
        rows = np.array(problem.kv_layout.counts, dtype=np.int64)
        others = ranks[(ranks != problem.rank) & (rows > 0)]
        receivers = ranks[(ranks != problem.rank) & (rows[problem.rank] > 0)]
        here = np.full_like(ranks, problem.rank)
        incoming = RowRanges(others, here[others], np.zeros_like(others), rows[others])
        outgoing = RowRanges(here[receivers], receivers, np.zeros_like(receivers), rows[here[receivers]])
        return staged(problem, KEYS, problem.seen(), incoming, outgoing, self.stages)

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        rows = np.array(workload.kv_layout.counts)
        size = len(workload.ranks), workload.world
        everything = replace(
            workload.demand(KEYS),
            incoming=np.broadcast_to(rows[None, :], size),
            outgoing=np.broadcast_to(rows[list(workload.ranks), None], size),
        )
        return staged_loads(workload, everything, KEYS, self.stages)

    def transfer_seconds(self, workload: Workload) -> float:
        rows, ranks = np.array(workload.kv_layout.counts), list(workload.ranks)
        of_node = workload.is_near @ rows
        return receiving_seconds(workload, of_node - rows[ranks], rows.sum() - of_node)

    def columns(self, workload: Workload) -> ProgramColumns:
        rows = np.array(workload.kv_layout.counts)
        receiver, owner = np.nonzero((1 - np.eye(workload.world, dtype=np.int64)) * (rows > 0))
        return staged_columns(workload, KEYS, self.stages, RowRanges(owner, receiver, np.zeros_like(owner), rows[owner]))

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        return [cls()]

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        return {"stages": range(1, 9)}
