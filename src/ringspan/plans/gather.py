"""Gather: every rank receives all keys, at once or in stages. The simplest plan, and the most memory."""

from __future__ import annotations

from dataclasses import dataclass

from ringspan.plans.plan import Program
from ringspan.plans.scene import Scene
from ringspan.plans.staged import check_stages, staged


@dataclass(frozen=True, slots=True)
class Gather:
    """All keys, whether seen or not. One stage lets one launch cover them all; more stages hide the wire behind computing."""

    stages: int = 1

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def __call__(self, scene: Scene) -> Program:
        everyone = range(scene.world)
        incoming = {owner: scene.all_rows(owner) for owner in everyone}
        outgoing = {asker: scene.all_rows(scene.rank) for asker in everyone}
        return staged(scene, scene.seen(), incoming, outgoing, self.stages)
