"""Exchange: every rank receives just the keys that its queries see, straight from their owners, in stages that overlap."""

from __future__ import annotations

from dataclasses import dataclass

from ringspan.plans.data import Program
from ringspan.plans.moving_side import KEYS
from ringspan.plans.problem import Problem
from ringspan.strategies.staged import check_stages, staged


@dataclass(frozen=True, slots=True)
class Exchange:
    """Only what is needed. For packed documents and windows that is a small part of all keys."""

    stages: int = 2

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def __call__(self, problem: Problem) -> Program:
        tiles = KEYS.tiles(problem)
        return staged(problem, KEYS, tiles, KEYS.incoming(problem, tiles), KEYS.outgoing(problem), self.stages)
