"""Transfer rows directly from their owners, in stages: keys for gather and exchange, queries for pass_q.

::

    8 ranks, 2 stages    step 0                 step 1                  step 2     step 3
    receive              stage 0 (from the 4    stage 1 (from the 3     –          –
                         preceding ranks)       ranks before those)
    compute              own rows               stage 0                 stage 1    –
    return results       –                      –                       stage 0    stage 1

The rows of a stage are in the order of the whole sequence, so that bands which the layout split join again. Stages use
two slots in turn. The last line and step 3 exist only if results belong to the owners: the gradient of keys, the output
or gradient of queries. Those of a stage are returned while the next stage is computed, those of the last stage in an
extra step that computes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringspan.errors import PlanError
from ringspan.layouts import Tiles
from ringspan.plans.data import PayloadKind, Phase, Program, Slot, Step, Task, Transfer
from ringspan.plans.moving_side import MovingSide, RowRanges
from ringspan.plans.problem import Problem
from ringspan.strategies.incoming_rows import OWN, assign_slot_rows, bands_by_stage, by_peer, split_at_spans


def staged(
    problem: Problem, moving: MovingSide, tiles: Tiles, incoming: RowRanges, outgoing: RowRanges, stages: int
) -> Program:
    """Return the program of a rank that receives the incoming rows from their owners and sends the outgoing ones, in
    stages.

    ``tiles`` are the visible bands that this rank computes, in the owners' rows.
    """
    world, rank = problem.world, problem.rank
    stages = min(stages, world - 1)
    stage_of = np.array([0, *((d - 1) * stages // (world - 1) for d in range(1, world))], dtype=np.int64)  # by distance
    arriving, token, token_step = split_at_spans(moving.layout(problem), incoming)
    placed = assign_slot_rows(arriving, token, token_step, stage_of[(rank - arriving.owner) % world])
    leaving, _, _ = split_at_spans(moving.layout(problem), outgoing)
    bands = bands_by_stage(moving, tiles, placed, rank)

    def slot(stage: int) -> int:
        return 1 + stage % 2

    from_owner = by_peer(placed.owner, placed.slot_row, placed.slot_row + placed.size)
    to_receiver = by_peer(leaving.receiver, leaving.start, leaving.stop)
    distances = [(np.flatnonzero(stage_of[1:] == stage) + 1).tolist() for stage in range(stages)]

    def with_owners(what: PayloadKind, stage: int) -> tuple[Transfer, ...]:
        """Return the transfers with the owners of a stage's rows: receives of the inputs, or sends of the results."""
        owners = ((rank - d) % world for d in distances[stage])
        return tuple(Transfer(what=what, peer=p, slot=slot(stage), rows=rows) for p in owners for rows in from_owner.get(p, ()))

    def with_receivers(what: PayloadKind, stage: int) -> tuple[Transfer, ...]:
        """Return the transfers with the ranks that use this rank's rows in a stage: sends of the inputs, or receives of
        the results."""
        receivers = ((rank + d) % world for d in distances[stage])
        return tuple(Transfer(what=what, peer=p, slot=0, rows=rows) for p in receivers for rows in to_receiver.get(p, ()))

    def task(stage: int) -> Task:
        if stage == OWN:
            return moving.task(0, bands[OWN], None)
        return moving.task(slot(stage), bands[stage], placed.tokens(stage))

    tasks_by_stage = {stage: (task(stage),) for stage in bands}

    def step(n: int, returned: PayloadKind | None) -> Step:
        sends, recvs = (with_receivers(moving.what, n), with_owners(moving.what, n)) if n < stages else ((), ())
        if returned and n >= 2:
            sends += with_owners(returned, n - 2)
            recvs += with_receivers(returned, n - 2)
        return Step(sends=sends, recvs=recvs, tasks=tasks_by_stage.get(OWN if n == 0 else n - 1, ()))

    def steps(phase: Phase) -> tuple[Step, ...]:
        returned = moving.returned[phase]
        return tuple(step(n, returned) for n in range(stages + (2 if returned and stages else 1)))

    rows_per_stage = [placed.rows(stage) for stage in range(stages)]
    stage_slots = tuple(Slot(rows=max(rows_per_stage[k::2])) for k in range(min(stages, 2)))
    return Program(
        forward=steps("forward"),
        backward=steps("backward"),
        q_slots=(Slot(rows=problem.q_rows), *(stage_slots if moving.what == "q" else ())),
        kv_slots=(Slot(rows=problem.kv_rows), *(stage_slots if moving.what == "kv" else ())),
    )


def check_stages(stages: Any) -> None:
    if not isinstance(stages, int) or stages < 1:
        raise PlanError(f"stages must be an integer of at least 1; got {stages!r}")
