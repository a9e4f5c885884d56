"""Exchange: every rank receives just the keys that its queries see, straight from their owners, in stages that overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspan.masks.table import K0, K1
from ringspan.plans.data import Program
from ringspan.plans.scene import Scene, union
from ringspan.plans.staged import Wanted, check_stages, staged


@dataclass(frozen=True, slots=True)
class Exchange:
    """Only what is needed. For packed documents and windows that is a small part of all keys."""

    stages: int = 2

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def __call__(self, scene: Scene) -> Program:
        mine, theirs = scene.seen(), scene.seeing()
        owner, *rows = union(mine.k_rank, mine.bands[:, K0], mine.bands[:, K1])
        asker, *given = union(theirs.q_rank, theirs.bands[:, K0], theirs.bands[:, K1])
        away, others = owner != scene.rank, asker != scene.rank
        incoming = Wanted(*(x[away] for x in (owner, np.full_like(owner, scene.rank), *rows)))
        outgoing = Wanted(*(x[others] for x in (np.full_like(asker, scene.rank), asker, *given)))
        return staged(scene, mine, incoming, outgoing, self.stages)
