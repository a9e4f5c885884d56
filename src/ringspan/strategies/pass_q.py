"""Pass-Q: queries are sent to the ranks that own the keys they see, and the partial results are sent back.

::

    2 stages, forward (backward dq comes back in the place of out)
                      step 0              step 1              step 2              step 3
    communication     q of stage 0        q of stage 1        out of stage 0      out of stage 1
    computing         home                stage 0             stage 1             –
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspan.costs.hardware import Hardware
from ringspan.costs.timeline import Loads
from ringspan.costs.workload import Workload
from ringspan.plans.data import Phase, Program
from ringspan.plans.moving_side import QUERIES
from ringspan.plans.problem import Problem
from ringspan.plans.shape import Shape
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.staged import check_stages, staged
from ringspan.strategies.staged_loads import staged_loads


@dataclass(frozen=True, slots=True)
class PassQ(Strategy):
    """Keys are not sent. Fewer bytes where there are few queries for many keys: cross-attention, decoding, chunks of a
    prompt.

    A query is sent to the keys, and its result is sent back in float32 at least. Backward, it is sent with all that its
    gradient needs. The owner of the keys computes, so it is the layout of the *keys* that balances the work.
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

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        return [cls()] if world > 1 else []

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        return {"stages": range(1, 9)}
