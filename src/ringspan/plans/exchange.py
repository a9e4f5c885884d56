"""Exchange: every rank receives just the keys that its queries see, straight from their owners, in stages that overlap."""

from __future__ import annotations

from dataclasses import dataclass

from ringspan.masks.table import K0, K1
from ringspan.plans.plan import Program
from ringspan.plans.scene import Ints, Rows, Scene, union
from ringspan.plans.staged import check_stages, staged


@dataclass(frozen=True, slots=True)
class Exchange:
    """Only what is needed. For packed documents and windows that is a small part of all keys."""

    stages: int = 4

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def __call__(self, scene: Scene) -> Program:
        mine, theirs = scene.seen(), scene.seeing()
        incoming = _rows_by_rank(mine.k_rank, mine.bands[:, K0], mine.bands[:, K1])
        outgoing = _rows_by_rank(theirs.q_rank, theirs.bands[:, K0], theirs.bands[:, K1])
        return staged(scene, mine, incoming, outgoing, self.stages)


def _rows_by_rank(rank: Ints, start: Ints, stop: Ints) -> dict[int, Rows]:
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for r, a, b in zip(*(column.tolist() for column in union(rank, start, stop)), strict=True):
        by_rank.setdefault(r, []).append((a, b))
    return {r: tuple(rows) for r, rows in by_rank.items()}
