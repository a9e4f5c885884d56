"""Rows that come straight from their owners, in stages: keys for gather and exchange, queries for pass_q.

::

    8 ranks, 2 stages       step 0               step 1               step 2
    on the wire             stage 0 (from the    stage 1 (from the    –
                            4 ranks before me)   3 ranks beyond)
    computing               home                 stage 0              stage 1

Within its slot a stage lies in the order of the whole sequence. Stages share two slots in turn. What was found for a stage and
belongs to its owners (the gradient of keys, the result or gradient of queries) goes back while the next stage is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringspan.errors import PlanError
from ringspan.layouts import Layout, Tiles
from ringspan.masks import Band
from ringspan.masks import table as tables
from ringspan.plans.data import Phase, Program, Slot, Step, Transfer, What
from ringspan.plans.scene import Ints, Rows, Scene, bands_by_group
from ringspan.plans.travellers import Traveller, Wanted

# Up to so many ranges of rows travel as messages of their own.
UNPACKED = 2


class _Visitors(NamedTuple):
    """Rows of other ranks, in the order of their owners' rows, and where they lie: from row ``at`` of their stage's slot."""

    owner: Ints
    start: Ints
    stop: Ints
    stage: Ints
    at: Ints


def staged(scene: Scene, traveller: Traveller, tiles: Tiles, incoming: Wanted, outgoing: Wanted, stages: int) -> Program:
    """The program in which a rank gets the incoming rows from their owners and gives the outgoing ones away, in stages.

    ``tiles`` are what this rank computes, in the owners' rows.
    """
    world, rank = scene.world, scene.rank
    stages = min(stages, world - 1)
    stage_of = np.array([0, *((d - 1) * stages // (world - 1) for d in range(1, world))], dtype=np.int64)  # by distance
    arriving, token = _by_token(traveller.layout(scene), incoming)
    visitors = _lay_out(arriving, token, stage_of[(rank - arriving.of) % world])
    leaving, _ = _by_token(traveller.layout(scene), outgoing)
    bands = _bands_by_stage(traveller, tiles, visitors, rank)

    def slot(stage: int) -> int:
        return 1 + stage % 2

    away = by_peer(visitors.owner, visitors.at, visitors.at + visitors.stop - visitors.start)
    home = by_peer(leaving.by, leaving.start, leaving.stop)

    def guests(what: What, stage: int) -> tuple[Transfer, ...]:
        """The rows of others (or what was found for them) that this rank holds in a stage."""
        owners = ((rank - d) % world for d in range(1, world) if stage_of[d] == stage)
        return tuple(Transfer(what=what, peer=p, slot=slot(stage), rows=rows) for p in owners for rows in away.get(p, ()))

    def own(what: What, stage: int) -> tuple[Transfer, ...]:
        """The rank's own rows (or what was found for them) that others hold in a stage."""
        askers = ((rank + d) % world for d in range(1, world) if stage_of[d] == stage)
        return tuple(Transfer(what=what, peer=p, slot=0, rows=rows) for p in askers for rows in home.get(p, ()))

    def step(n: int, back: What | None) -> Step:
        sends, recvs = own(traveller.what, n), guests(traveller.what, n)
        if back:
            sends += guests(back, n - 2)
            recvs += own(back, n - 2)
        computed = bands.get(n - 1, ())
        tasks = (traveller.task(0 if n == 0 else slot(n - 1), computed),) if computed else ()
        return Step(sends=sends, recvs=recvs, tasks=tasks)

    def steps(phase: Phase) -> tuple[Step, ...]:
        back = traveller.back[phase]
        return tuple(step(n, back) for n in range(stages + (2 if back and stages else 1)))

    filled = [int((visitors.stop - visitors.start)[visitors.stage == stage].sum()) for stage in range(stages)]
    visiting = tuple(Slot(rows=max(filled[k::2])) for k in range(min(stages, 2)))
    return Program(
        forward=steps("forward"),
        backward=steps("backward"),
        q_slots=(Slot(rows=scene.q_rows), *(visiting if traveller.what == "q" else ())),
        kv_slots=(Slot(rows=scene.kv_rows), *(visiting if traveller.what == "kv" else ())),
    )


def _by_token(layout: Layout, rows: Wanted) -> tuple[Wanted, Ints]:
    """The rows cut where their owner's tokens stop being neighbours, and the first token of each."""
    p = layout.pieces
    of, at = rows.of << 32, (p.owner << 32) + p.at  # rows of different owners lie too far apart to meet
    i, j = tables.overlapping(of + rows.start, of + rows.stop, at, at + p.size)
    start = np.maximum(rows.start[i], p.at[j])
    stop = np.minimum(rows.stop[i], p.at[j] + p.size[j])
    order = np.lexsort((start, rows.by[i], rows.of[i]))
    cut = Wanted(*(column[order] for column in (rows.of[i], rows.by[i], start, stop)))
    return cut, (p.start[j] + (start - p.at[j]) * p.step[j])[order]


def _lay_out(rows: Wanted, token: Ints, stage: Ints) -> _Visitors:
    """A place for everything that comes: stage by stage, and there in the order of the whole sequence, so that bands which a
    layout has cut apart join again."""
    order = np.lexsort((token, stage))
    size = (rows.stop - rows.start)[order]
    before = np.cumsum(size) - size
    first = np.searchsorted(stage[order], stage[order], side="left")
    at = np.empty_like(before)
    at[order] = before - before[first] if len(before) else before
    return _Visitors(rows.of, rows.start, rows.stop, stage, at)


def by_peer(peer: Ints, start: Ints, stop: Ints) -> dict[int, list[Rows]]:
    """The messages to or from each peer: one for each range of rows where they are few, so that nothing is packed; one packed
    message where they are many."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for p, a, b in zip(peer.tolist(), start.tolist(), stop.tolist(), strict=True):
        ranges.setdefault(p, []).append((a, b))
    return {p: [(span,) for span in spans] if len(spans) <= UNPACKED else [tuple(spans)] for p, spans in ranges.items()}


def _bands_by_stage(traveller: Traveller, tiles: Tiles, visitors: _Visitors, rank: int) -> dict[int, tuple[Band, ...]]:
    """The tiles moved from their owners' rows to the rows of the slots, joined; the home ones under stage -1."""
    owner = np.append(visitors.owner, rank)
    start = np.append(visitors.start, 0)
    shift = np.append(visitors.at - visitors.start, 0)
    stage = np.append(visitors.stage, -1)
    key = (owner << 32) + start
    order = np.argsort(key)
    first = tiles.bands[:, traveller.rows[0]]
    hit = order[np.searchsorted(key[order], (traveller.owner(tiles) << 32) + first, side="right") - 1]
    return bands_by_group(traveller.shifted(tiles.bands, shift[hit]), stage[hit])


def check_stages(stages: Any) -> None:
    if not isinstance(stages, int) or stages < 1:
        raise PlanError(f"stages must be a whole number, at least 1; got {stages!r}")
