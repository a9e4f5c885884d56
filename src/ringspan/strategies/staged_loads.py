"""A lower bound of each step for strategies that transfer rows directly from their owners in stages (``staged.py``)."""

from __future__ import annotations

import numpy as np

from ringspan.costs.plan_cost import copying_seconds, tensors_of
from ringspan.costs.timeline import NO_PEERS, Ints, Loads, RankPeers, Seconds, communication_seconds, nearest
from ringspan.costs.workload import Demand, Workload
from ringspan.plans.data import PHASES, Phase
from ringspan.plans.moving_side import MovingSide


def staged_loads(workload: Workload, demand: Demand, moving: MovingSide, stages: int) -> dict[Phase, Loads]:
    stages = min(stages, workload.world - 1)
    receive_stage, send_stage = _stage_of_peers(workload, stages)
    links = (workload.is_near, ~workload.is_near)
    arriving = np.stack([_by_stage(demand.incoming * link, receive_stage, stages)[:, 1:] for link in links])
    leaving = np.stack([_by_stage(demand.outgoing * link, send_stage, stages)[:, 1:] for link in links])
    additions = _by_stage(np.sign(demand.outgoing), send_stage, stages)[:, 1:]  # messages of results that come back
    stage_peers = _peers_by_stage(workload, demand, receive_stage, send_stage, stages)
    found: dict[Phase, Loads] = {}
    for phase in PHASES:
        what, returned = moving.what, moving.returned[phase] if stages else None
        steps = stages + (2 if returned else 1)
        computing = np.zeros((len(workload.ranks), steps))
        computing[:, : stages + 1] = _by_stage(demand.seconds[phase], receive_stage, stages)
        sent, received = (np.zeros((2, *computing.shape)) for _ in range(2))
        (copied, copies), peers = np.zeros((2, *computing.shape)), [*stage_peers, *[NO_PEERS] * (steps - stages)]
        sent[:, :, :stages] = leaving * workload.message_row_bytes(what, phase)
        received[:, :, :stages] = arriving * workload.message_row_bytes(what, phase)
        if returned:  # the results of a stage are sent back two steps after its rows arrived
            sent[:, :, 2:] += arriving * workload.message_row_bytes(returned, phase)
            received[:, :, 2:] += leaving * workload.message_row_bytes(returned, phase)
            copies[:, 2:] = additions * tensors_of(returned)
            copied[:, 2:] = leaving.sum(axis=0) * workload.message_row_bytes(returned, phase)
            peers = [_both(a, b) for a, b in zip(peers, [NO_PEERS, NO_PEERS, *stage_peers], strict=True)]
        communication = communication_seconds(sent, received, workload.machine)
        copying = copying_seconds(copied, copies, workload.machine)
        found[phase] = Loads(workload.launched(computing), communication, copying, peers)
    return found


def _stage_of_peers(workload: Workload, stages: int) -> tuple[Ints, Ints]:
    """Return matrices with a row for each rank of the workload and a column for each rank of the world: the stage in
    which rows are received from it, and the stage in which rows are sent to it. Stages count from 1; 0 stands for the
    rank itself."""
    distance = np.arange(workload.world)
    stage = np.where(distance > 0, 1 + (distance - 1) * stages // max(1, workload.world - 1), 0)
    rank, peer = np.array(workload.ranks)[:, None], np.arange(workload.world)[None, :]
    return stage[(rank - peer) % workload.world], stage[(peer - rank) % workload.world]


def _by_stage(value: Seconds | Ints, stage: Ints, stages: int) -> Seconds:
    """Return the sums over the peers of each stage, the rank itself first."""
    size = len(value), stages + 1
    cell = np.arange(size[0])[:, None] * size[1] + stage
    total: Seconds = np.bincount(cell.ravel(), weights=value.ravel(), minlength=size[0] * size[1]).astype(np.float64)
    return total.reshape(size)


def _peers_by_stage(workload: Workload, demand: Demand, receive_stage: Ints, send_stage: Ints, stages: int) -> list[RankPeers]:
    """Return which ranks exchange rows in each stage."""
    row_of = nearest(np.array(workload.ranks), workload.world)
    receive_stage, send_stage = np.where(demand.incoming > 0, receive_stage, 0), np.where(demand.outgoing > 0, send_stage, 0)
    pairs = (np.nonzero((receive_stage == stage) | (send_stage == stage)) for stage in range(1, stages + 1))
    return [(row, row_of[peer]) for row, peer in pairs]


def _both(a: RankPeers, b: RankPeers) -> RankPeers:
    return np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])
