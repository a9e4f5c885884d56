"""The programs of all ranks as columns, for strategies that transfer rows directly from their owners in stages
(``staged.py``)."""

from __future__ import annotations

import numpy as np

from ringspan.costs.workload import Workload
from ringspan.plans.columns import Messages, ProgramColumns
from ringspan.plans.data import PHASES, Phase
from ringspan.plans.moving_side import MovingSide, RowRanges
from ringspan.plans.problem import whole_tiles
from ringspan.strategies.arrivals import Arrivals, needed_ranges


def staged_columns(workload: Workload, moving: MovingSide, stages: int, moved: RowRanges | None = None) -> ProgramColumns:
    """Return the columns of the programs that :func:`ringspan.strategies.staged.staged` makes.

    ``moved`` are the rows that are sent; by default those that their receivers need.
    """
    world, stages = workload.world, min(stages, workload.world - 1)
    tiles = whole_tiles(workload.mask, workload.q_layout, workload.kv_layout)
    rank = np.arange(world)
    stage_of = np.maximum((rank[:, None] - rank[None, :]) % world - 1, 0) * stages // max(1, world - 1)
    rows = needed_ranges(tiles, moving, world) if moved is None else moved
    layout = workload.kv_layout if moving.what == "kv" else workload.q_layout
    arrivals = Arrivals.of(layout, rows, stage_of, stages)
    joined = arrivals.messages()
    steps: dict[Phase, int] = {}
    messages: dict[Phase, tuple[Messages, ...]] = {}
    for phase in PHASES:
        returned = moving.returned[phase]
        back = (joined.results(returned, joined.stage + 2),) if returned else ()
        messages[phase] = joined.inputs(moving.what, joined.stage), *back
        steps[phase] = stages + (2 if returned and stages else 1)
    by_stage = arrivals.rows_by_stage(world)
    received = [by_stage[:, k::2].max(axis=1) for k in range(min(stages, 2))]
    of_queries, of_keys = (np.array(layout.counts) for layout in (workload.q_layout, workload.kv_layout))
    return ProgramColumns(
        world=world,
        steps=steps,
        tasks=arrivals.tasks(workload, moving, 1 + np.arange(stages) % 2),
        messages=messages,
        q_slots=np.stack([of_queries, *(received if moving.what == "q" else [])], axis=1),
        kv_slots=np.stack([of_keys, *(received if moving.what == "kv" else [])], axis=1),
        dkv_dtype=workload.dkv_dtype,
    )
