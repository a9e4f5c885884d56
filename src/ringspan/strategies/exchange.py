"""Exchange: every rank receives just the keys that its queries see, straight from their owners, in stages that overlap."""

from __future__ import annotations

from dataclasses import dataclass

from ringspan.plans.data import Program
from ringspan.plans.moving_side import KEYS
from ringspan.plans.problem import Scene
from ringspan.strategies.staged import check_stages, staged


@dataclass(frozen=True, slots=True)
class Exchange:
    """Only what is needed. For packed documents and windows that is a small part of all keys."""

    stages: int = 2

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def __call__(self, scene: Scene) -> Program:
        tiles = KEYS.tiles(scene)
        return staged(scene, KEYS, tiles, KEYS.incoming(scene, tiles), KEYS.outgoing(scene), self.stages)
