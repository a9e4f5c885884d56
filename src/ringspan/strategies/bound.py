"""How long a strategy takes at least, without planning it.

Its steps are walked as those of a plan are, with what is known beforehand: the tiles of a layout, each at the best speed of the
kinds it may be joined into, one launch for what a step computes, and the rows that have to travel. Planning can only add to
that: more launches, slower kinds, messages that have to be packed. With one exception: bands of a mask that complement each
other, as two triangles do, may join to one of a faster kind. Masks are seldom written so, and the error is no larger than the
kinds differ.
"""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

import numpy as np

from ringspan.costs.plan_cost import flops_per_pair
from ringspan.costs.timeline import NO_PEERS, Loads, Seconds, simulate, wire_seconds
from ringspan.costs.workload import Workload, tile_seconds
from ringspan.layouts import areas
from ringspan.plans.data import PHASES, Phase
from ringspan.plans.moving_side import KEYS, QUERIES
from ringspan.strategies.bound_ring import ring_loads
from ringspan.strategies.bound_staged import staged_loads
from ringspan.strategies.exchange import Exchange
from ringspan.strategies.gather import Gather
from ringspan.strategies.head_split import RESULTS
from ringspan.strategies.hierarchical import Hierarchical
from ringspan.strategies.hybrid import Hybrid
from ringspan.strategies.pass_q import PassQ
from ringspan.strategies.ring import Ring
from ringspan.strategies.ulysses import Ulysses


def least_seconds(strategy: object, workload: Workload) -> float:
    """Forward and backward."""
    return sum(simulate(loads, workload.machine.overlap).seconds for loads in _loads(strategy, workload).values())


@singledispatch
def _loads(strategy: object, workload: Workload) -> dict[Phase, Loads]:
    """What the ranks have to do in each step at least: with a strategy that nobody here knows, nothing."""
    return {phase: _alone(np.zeros((len(workload.ranks), 1))) for phase in PHASES}


@_loads.register
def _(strategy: Exchange, workload: Workload) -> dict[Phase, Loads]:
    return staged_loads(workload, workload.keys_travel, KEYS, strategy.stages)


@_loads.register
def _(strategy: PassQ, workload: Workload) -> dict[Phase, Loads]:
    return staged_loads(workload, workload.queries_travel, QUERIES, strategy.stages)


@_loads.register
def _(strategy: Gather, workload: Workload) -> dict[Phase, Loads]:
    rows = np.array(workload.kv_layout.counts)
    size = len(workload.ranks), workload.world
    everything = replace(
        workload.keys_travel,
        incoming=np.broadcast_to(rows[None, :], size),
        outgoing=np.broadcast_to(rows[list(workload.ranks), None], size),
    )
    return staged_loads(workload, everything, KEYS, strategy.stages)


@_loads.register
def _(strategy: Ring, workload: Workload) -> dict[Phase, Loads]:
    return ring_loads(workload)


@_loads.register
def _(strategy: Hierarchical, workload: Workload) -> dict[Phase, Loads]:
    """Which rows cross between nodes is not looked at."""
    return {phase: _alone(workload.keys_travel.seconds[phase].sum(axis=1, keepdims=True)) for phase in PHASES}


@_loads.register
def _(strategy: Ulysses, workload: Workload) -> dict[Phase, Loads]:
    whole = tile_seconds(workload.mask.table, workload.machine, workload.shape)
    return _head_split(workload, workload.world, {phase: float(whole[phase].sum()) for phase in PHASES})


@_loads.register
def _(strategy: Hybrid, workload: Workload) -> dict[Phase, Loads]:
    """What travels between nodes is not looked at, and the busiest node computes at the best speed."""
    per_node = min(strategy.per_node, workload.world)
    pairs = np.add.reduceat(areas(workload.mask, workload.q_layout), np.arange(0, workload.world, per_node)).max()
    shape, machine = workload.shape, workload.machine
    speeds = {"forward": machine.forward.best, "backward": machine.backward.best}
    work = {phase: float(pairs) * shape.heads * flops_per_pair(shape, phase) / speeds[phase] for phase in PHASES}
    return _head_split(workload, per_node, work)


def _head_split(workload: Workload, per_node: int, whole: dict[Phase, float]) -> dict[Phase, Loads]:
    """Queries out, computing, results back. ``whole`` is what all heads of the tokens of the busiest group of ranks take.

    Nobody keeps more query heads than ⌈heads / ranks⌉, so all others of a rank's own tokens leave it; those that cannot stay on
    its node leave that, too. Keys are not looked at.
    """
    shape, machine = workload.shape, workload.machine
    kept = -(-shape.heads // per_node)
    far = max(0, shape.heads - kept * min(per_node, machine.per_node))
    rows = max(workload.q_layout.counts[rank] for rank in workload.ranks)
    share = kept / shape.heads if shape.heads else 0.0
    found: dict[Phase, Loads] = {}
    for phase in PHASES:
        leaving = [rows * shape.row_bytes(what, phase, far or shape.heads - kept) for what in ("q", RESULTS[phase][0])]
        moved = np.zeros((2, 1, 3))
        moved[1 if far else 0, 0, [0, 2]] = leaving
        found[phase] = _alone(np.array([[0.0, whole[phase] * share, 0.0]]))._replace(
            wire=wire_seconds(moved, moved, machine), copying=moved.sum(axis=0) / machine.copy_bytes_per_s
        )
    return found


def _alone(computing: Seconds) -> Loads:
    """Steps without messages."""
    return Loads(computing, np.zeros_like(computing), np.zeros_like(computing), [NO_PEERS] * computing.shape[1])
