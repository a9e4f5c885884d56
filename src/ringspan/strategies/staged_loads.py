"""What ranks have to do in each step at least, where rows come straight from their owners in stages: see
``staged.py``."""

from __future__ import annotations

import numpy as np

from ringspan.costs.timeline import NO_PEERS, Ints, Loads, Pairs, Seconds, nearest, wire_seconds
from ringspan.costs.workload import Demand, Workload
from ringspan.plans.data import PHASES, Phase
from ringspan.plans.moving_side import MovingSide


def staged_loads(workload: Workload, demand: Demand, moving: MovingSide, stages: int) -> dict[Phase, Loads]:
    stages = min(stages, workload.world - 1)
    comes, goes = _stage_of_peers(workload, stages)
    links = (workload.is_near, ~workload.is_near)
    arriving = np.stack([_by_stage(demand.incoming * link, comes, stages)[:, 1:] for link in links])
    leaving = np.stack([_by_stage(demand.outgoing * link, goes, stages)[:, 1:] for link in links])
    met = _met(workload, demand, comes, goes, stages)
    found: dict[Phase, Loads] = {}
    for phase in PHASES:
        what, back = moving.what, moving.back[phase] if stages else None
        steps = stages + (2 if back else 1)
        computing = np.zeros((len(workload.ranks), steps))
        computing[:, : stages + 1] = _by_stage(demand.seconds[phase], comes, stages)
        sent, received = (np.zeros((2, *computing.shape)) for _ in range(2))
        copied, meets = np.zeros(computing.shape), [*met, *[NO_PEERS] * (steps - stages)]
        sent[:, :, :stages] = leaving * workload.shape.row_bytes(what, phase)
        received[:, :, :stages] = arriving * workload.shape.row_bytes(what, phase)
        if back:  # what was found for a stage goes home two steps after its rows came
            sent[:, :, 2:] += arriving * workload.shape.row_bytes(back, phase)
            received[:, :, 2:] += leaving * workload.shape.row_bytes(back, phase)
            copied[:, 2:] = leaving.sum(axis=0) * workload.shape.row_bytes(back, phase)
            meets = [_both(a, b) for a, b in zip(meets, [NO_PEERS, NO_PEERS, *met], strict=True)]
        wire = wire_seconds(sent, received, workload.machine)
        found[phase] = Loads(workload.launched(computing), wire, copied / workload.machine.copy_bytes_per_s, meets)
    return found


def _stage_of_peers(workload: Workload, stages: int) -> tuple[Ints, Ints]:
    """For each rank that is looked at (row) and each of the world (column): the stage in which its rows come, and that
    in which the own ones go there. From 1 on, and 0 for the rank itself."""
    distance = np.arange(workload.world)
    stage = np.where(distance > 0, 1 + (distance - 1) * stages // max(1, workload.world - 1), 0)
    rank, everybody = np.array(workload.ranks)[:, None], np.arange(workload.world)[None, :]
    return stage[(rank - everybody) % workload.world], stage[(everybody - rank) % workload.world]


def _by_stage(value: Seconds | Ints, stage: Ints, stages: int) -> Seconds:
    """The sums over peers of each stage, home first."""
    size = len(value), stages + 1
    cell = np.arange(size[0])[:, None] * size[1] + stage
    total: Seconds = np.bincount(cell.ravel(), weights=value.ravel(), minlength=size[0] * size[1]).astype(np.float64)
    return total.reshape(size)


def _met(workload: Workload, demand: Demand, comes: Ints, goes: Ints, stages: int) -> list[Pairs]:
    """Who exchanges rows with whom in each stage."""
    row_of = nearest(np.array(workload.ranks), workload.world)
    comes, goes = np.where(demand.incoming > 0, comes, 0), np.where(demand.outgoing > 0, goes, 0)
    pairs = (np.nonzero((comes == stage) | (goes == stage)) for stage in range(1, stages + 1))
    return [(row, row_of[peer]) for row, peer in pairs]


def _both(a: Pairs, b: Pairs) -> Pairs:
    return np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])
