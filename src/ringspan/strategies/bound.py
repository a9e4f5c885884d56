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

from ringspan.costs.cost import flops_per_pair
from ringspan.costs.timeline import NOBODY, Loads, Seconds, walk, wire_seconds
from ringspan.costs.workload import Site, tile_seconds
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


def least_seconds(strategy: object, site: Site) -> float:
    """Forward and backward."""
    return sum(walk(loads, site.machine.overlap).seconds for loads in _loads(strategy, site).values())


@singledispatch
def _loads(strategy: object, site: Site) -> dict[Phase, Loads]:
    """What the ranks have to do in each step at least: with a strategy that nobody here knows, nothing."""
    return {phase: _alone(np.zeros((len(site.ranks), 1))) for phase in PHASES}


@_loads.register
def _(strategy: Exchange, site: Site) -> dict[Phase, Loads]:
    return staged_loads(site, site.keys_travel, KEYS, strategy.stages)


@_loads.register
def _(strategy: PassQ, site: Site) -> dict[Phase, Loads]:
    return staged_loads(site, site.queries_travel, QUERIES, strategy.stages)


@_loads.register
def _(strategy: Gather, site: Site) -> dict[Phase, Loads]:
    rows = np.array(site.kv_layout.counts)
    size = len(site.ranks), site.world
    everything = replace(
        site.keys_travel,
        incoming=np.broadcast_to(rows[None, :], size),
        outgoing=np.broadcast_to(rows[list(site.ranks), None], size),
    )
    return staged_loads(site, everything, KEYS, strategy.stages)


@_loads.register
def _(strategy: Ring, site: Site) -> dict[Phase, Loads]:
    return ring_loads(site)


@_loads.register
def _(strategy: Hierarchical, site: Site) -> dict[Phase, Loads]:
    """Which rows cross between nodes is not looked at."""
    return {phase: _alone(site.keys_travel.seconds[phase].sum(axis=1, keepdims=True)) for phase in PHASES}


@_loads.register
def _(strategy: Ulysses, site: Site) -> dict[Phase, Loads]:
    whole = tile_seconds(site.mask.table, site.machine, site.shape)
    return _head_split(site, site.world, {phase: float(whole[phase].sum()) for phase in PHASES})


@_loads.register
def _(strategy: Hybrid, site: Site) -> dict[Phase, Loads]:
    """What travels between nodes is not looked at, and the busiest node computes at the best speed."""
    per_node = min(strategy.per_node, site.world)
    pairs = np.add.reduceat(areas(site.mask, site.q_layout), np.arange(0, site.world, per_node)).max()
    speeds = {"forward": site.machine.forward.best, "backward": site.machine.backward.best}
    work = {phase: float(pairs) * site.shape.heads * flops_per_pair(site.shape, phase) / speeds[phase] for phase in PHASES}
    return _head_split(site, per_node, work)


def _head_split(site: Site, per_node: int, whole: dict[Phase, float]) -> dict[Phase, Loads]:
    """Queries out, computing, results back. ``whole`` is what all heads of the tokens of the busiest group of ranks take.

    Nobody keeps more query heads than ⌈heads / ranks⌉, so all others of a rank's own tokens leave it; those that cannot stay on
    its node leave that, too. Keys are not looked at.
    """
    shape, machine = site.shape, site.machine
    kept = -(-shape.heads // per_node)
    far = max(0, shape.heads - kept * min(per_node, machine.per_node))
    rows = max(site.q_layout.counts[rank] for rank in site.ranks)
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
    return Loads(computing, np.zeros_like(computing), np.zeros_like(computing), [NOBODY] * computing.shape[1])
