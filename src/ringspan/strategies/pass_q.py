"""Pass-Q: queries are sent to the ranks that own the keys they see, and the partial results are sent back.

::

    2 stages, forward (in backward, dq is sent back instead of out)
                      step 0              step 1              step 2              step 3
    communication     q of stage 0        q of stage 1        out of stage 0      out of stage 1
    computing         own rows            stage 0             stage 1             –
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspan.costs.hardware import Hardware
from ringspan.costs.timeline import Loads
from ringspan.costs.workload import Workload
from ringspan.plans.columns import ProgramColumns
from ringspan.plans.data import Phase, Program
from ringspan.plans.moving_side import QUERIES
from ringspan.plans.problem import Problem
from ringspan.plans.shape import Shape
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.staged import check_stages, staged
from ringspan.strategies.staged_columns import staged_columns
from ringspan.strategies.staged_loads import staged_loads


@dataclass(frozen=True, slots=True)
class PassQ(Strategy):
    """Send queries instead of keys. This takes fewer bytes for few queries with many keys: cross-attention, decoding,
    chunks of a prompt.

    A query is sent to the keys, and its result is sent back in at least float32. In the backward pass it is sent with
    dout, out and lse. The owner of the keys computes, so the layout of the *keys* balances the work.
    """

    stages: int = 2

    moving_side = QUERIES

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def __call__(self, problem: Problem) -> Program:
        tiles = QUERIES.tiles(problem)
        return staged(problem, QUERIES, tiles, QUERIES.incoming(problem, tiles), QUERIES.outgoing(problem), self.stages)

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        return staged_loads(workload, workload.demand(QUERIES), QUERIES, self.stages)

    def columns(self, workload: Workload) -> ProgramColumns:
        return staged_columns(workload, QUERIES, self.stages)

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        return [cls()] if world > 1 else []

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        return {"stages": range(1, 9)}
