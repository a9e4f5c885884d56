"""Exchange: every rank receives the keys that its queries see, and no others, directly from their owners, in stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspan.costs.hardware import Hardware
from ringspan.costs.timeline import Loads
from ringspan.costs.workload import Workload
from ringspan.plans.columns import ProgramColumns
from ringspan.plans.data import Phase, Program
from ringspan.plans.moving_side import KEYS
from ringspan.plans.problem import Problem
from ringspan.plans.shape import Shape
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.staged import check_stages, staged
from ringspan.strategies.staged_columns import staged_columns
from ringspan.strategies.staged_loads import staged_loads


@dataclass(frozen=True, slots=True)
class Exchange(Strategy):
    """Send only keys that are visible. For packed documents and windows they are a small part of all keys."""

    stages: int = 2

    moving_side = KEYS

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def __call__(self, problem: Problem) -> Program:
        tiles = KEYS.tiles(problem)
        return staged(problem, KEYS, tiles, KEYS.incoming(problem, tiles), KEYS.outgoing(problem), self.stages)

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        return staged_loads(workload, workload.demand(KEYS), KEYS, self.stages)

    def columns(self, workload: Workload) -> ProgramColumns:
        return staged_columns(workload, KEYS, self.stages)

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        return [cls(stages=1), cls(stages=2)] if world > 1 else []

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        return {"stages": range(1, 9)}
