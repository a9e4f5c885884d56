"""Keys that come straight from their owners, in stages: what gather and exchange have in common.

::

    8 ranks, 2 stages       step 0               step 1               step 2
    on the wire             stage 0 (from the    stage 1 (from the    –
                            4 ranks before me)   3 ranks beyond)
    computing               home                 stage 0              stage 1

Stages share two slots in turn. Backward, the gradient of a stage goes back to the owners while the next stage is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspan.errors import PlanError
from ringspan.layouts import Tiles
from ringspan.masks.table import HI, K0, K1, LO
from ringspan.plans.plan import Program, Slot, Step, Task, Transfer
from ringspan.plans.scene import Rows, Scene, bands_by_group


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Rows of an owner's keys, and where they are laid in the slot of their stage."""

    owner: int
    rows: Rows
    stage: int
    at: int

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.rows)


def staged(scene: Scene, tiles: Tiles, incoming: Mapping[int, Rows], outgoing: Mapping[int, Rows], stages: int) -> Program:
    """The program in which a rank gets the rows ``incoming[owner]`` and gives away ``outgoing[asker]``, in stages.

    ``tiles`` are what this rank's queries see, in the owners' rows.
    """
    world, rank = scene.world, scene.rank
    stages = min(stages, world - 1)
    stage_of = {d: (d - 1) * stages // (world - 1) for d in range(1, world)}
    arrivals: list[_Arrival] = []
    filled = [0] * stages
    for distance, stage in stage_of.items():
        owner = (rank - distance) % world
        if incoming.get(owner):
            arrivals.append(_Arrival(owner, incoming[owner], stage, filled[stage]))
            filled[stage] += arrivals[-1].count
    bands = _bands_by_stage(tiles, arrivals, rank)

    def slot(stage: int) -> int:
        return 1 + stage % 2

    def laid(what: Any, a: _Arrival) -> Transfer:
        return Transfer(what=what, peer=a.owner, slot=slot(a.stage), rows=((a.at, a.at + a.count),))

    def own(what: Any, stage: int) -> tuple[Transfer, ...]:
        """The rank's own keys (or their gradients) that others hold in a stage."""
        peers = ((rank + d) % world for d, s in stage_of.items() if s == stage)
        return tuple(Transfer(what=what, peer=peer, slot=0, rows=outgoing[peer]) for peer in peers if outgoing.get(peer))

    def step(n: int, *, backward: bool) -> Step:
        sends = own("kv", n)
        recvs = tuple(laid("kv", a) for a in arrivals if a.stage == n)
        if backward:
            sends += tuple(laid("dkv", a) for a in arrivals if a.stage == n - 2)
            recvs += own("dkv", n - 2)
        seen = bands.get(n - 1, ())
        tasks = (Task(kv_slot=0 if n == 0 else slot(n - 1), bands=seen),) if seen else ()
        return Step(sends=sends, recvs=recvs, tasks=tasks)

    sizes = [max((n for s, n in enumerate(filled) if slot(s) == k), default=0) for k in (1, 2)]
    return Program(
        forward=tuple(step(n, backward=False) for n in range(stages + 1)),
        backward=tuple(step(n, backward=True) for n in range(stages + 2 if stages else 1)),
        q_slots=(Slot(rows=scene.q_rows),),
        kv_slots=(Slot(rows=scene.kv_layout.counts[rank]), *(Slot(rows=n) for n in sizes)),
    )


def _bands_by_stage(tiles: Tiles, arrivals: list[_Arrival], rank: int) -> dict[int, Any]:
    """The tiles moved from their owners' rows to the rows of the slots, joined; the home ones under stage -1."""
    owner, start, shift, stage = [rank], [0], [0], [-1]
    for a in arrivals:
        at = a.at
        for first, last in a.rows:
            owner.append(a.owner)
            start.append(first)
            shift.append(at - first)
            stage.append(a.stage)
            at += last - first
    key = (np.array(owner) << 32) + np.array(start)
    order = np.argsort(key)
    hit = order[np.searchsorted(key[order], (tiles.k_rank << 32) + tiles.bands[:, K0], side="right") - 1]
    bands = tiles.bands.copy()
    bands[:, [K0, K1, LO, HI]] += np.array(shift)[hit][:, None]
    return bands_by_group(bands, np.array(stage)[hit])


def check_stages(stages: Any) -> None:
    if not isinstance(stages, int) or stages < 1:
        raise PlanError(f"stages must be a whole number, at least 1; got {stages!r}")
