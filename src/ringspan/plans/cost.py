"""What a plan costs on a machine: all ranks walk their steps, computing while messages travel.

A step of a rank begins when its last one has ended. Its messages start when both sides have posted them; all that a rank sends
over a link shares that link, and so does all that it receives. The step ends when its tasks are computed and its messages are
there::

    rank 0   |== compute 0 ==|=== compute 1 ===|........|== compute 2 ==|
             |~~ wire 0 ~~|  |~~~~~~~~ wire 1 ~~~~~~~~~~|                  the dots are exposed

That is a machine whose ``overlap`` is 1. Where it is less, computing and sending slow each other down, and the step is longer
by the rest of the shorter of the two. What has to be copied together before it travels, or apart when it has come, hides
nowhere.

Where there are too many ranks to plan them all, a sample walks: a peer that is not in it keeps pace with the nearest that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.masks import Band
from ringspan.plans.data import PHASES, Phase, Plan, Step, Task
from ringspan.plans.hardware import Hardware, Link, Speed
from ringspan.plans.shape import Shape, is_packed, peak_bytes

Seconds = NDArray[np.float64]


class Timeline(NamedTuple):
    """When each rank (row) begins each step (column), has computed it, and ends it; in seconds from the start of the phase."""

    begin: Seconds
    computed: Seconds
    end: Seconds

    @property
    def seconds(self) -> float:
        return float(self.end.max(initial=0.0))

    @property
    def exposed(self) -> Seconds:
        """How long messages keep each rank beyond its computing: waiting for them, copying them, slowed down by them."""
        waited: Seconds = (self.end - self.computed).sum(axis=1)
        return waited


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds and bytes of the slowest rank. Rows of the timelines belong to ``ranks``: to all of the world, or to a sample."""

    forward: Timeline
    backward: Timeline
    peak_bytes: int
    ranks: tuple[int, ...]
    world: int

    @property
    def is_exact(self) -> bool:
        """Whether every rank was walked, so that nothing but the model of the machine is an estimate."""
        return len(self.ranks) == self.world

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def exposed_s(self) -> float:
        """How long the rank that waits most waits for the wire."""
        return float((self.forward.exposed + self.backward.exposed).max(initial=0.0))


def cost(plans: Sequence[Plan], machine: Hardware, shape: Shape) -> Cost:
    """What the plans of all ranks cost together, or what those of some ranks, in order, tell about it."""
    fitted = [plan.for_heads(shape.heads, shape.kv_heads) for plan in plans]
    forward, backward = (_walk(fitted, machine, shape, phase) for phase in PHASES)
    peak = max(peak_bytes(plan, shape, phase) for plan in fitted for phase in PHASES)
    ranks = tuple(plan.rank for plan in fitted)
    return Cost(forward=forward, backward=backward, peak_bytes=peak, ranks=ranks, world=fitted[0].world)


def _walk(plans: Sequence[Plan], machine: Hardware, shape: Shape, phase: Phase) -> Timeline:
    steps = max(len(plan.program.steps(phase)) for plan in plans)
    begin, computed, end = (np.zeros((len(plans), steps)) for _ in range(3))
    now = np.zeros(len(plans))
    row_of = _nearest(np.array([plan.rank for plan in plans]), plans[0].world)
    for n in range(steps):
        arrived, longer = now.copy(), np.zeros(len(plans))
        begin[:, n] = now
        for row, plan in enumerate(plans):
            mine = plan.program.steps(phase)
            if n >= len(mine):
                continue
            computed[row, n] = sum(task_seconds(task, plan, machine, shape, phase) for task in mine[n].tasks)
            wire = _wire_seconds(plan, mine[n], machine, shape, phase)
            if wire:
                peers = {row_of[t.peer] for t in (*mine[n].sends, *mine[n].recvs)} | {row}
                arrived[row] = max(now[peer] for peer in peers) + wire
                longer[row] = (1 - machine.overlap) * min(computed[row, n], wire)
            longer[row] += _copied_bytes(plan, mine[n], shape, phase) / machine.copy_bytes_per_s
        computed[:, n] += now
        now = np.maximum(computed[:, n], arrived) + longer
        end[:, n] = now
    return Timeline(begin, computed, end)


def _nearest(ranks: NDArray[np.int64], world: int) -> list[int]:
    """For each rank of the world, which of the given ones, in order, is nearest: itself, if it is among them.

    >>> _nearest(np.array([0, 4, 5]), 6)
    [0, 0, 0, 1, 1, 2]
    """
    everybody = np.arange(world)
    after = np.minimum(np.searchsorted(ranks, everybody), len(ranks) - 1)
    before = np.maximum(after - 1, 0)
    is_nearer = np.abs(everybody - ranks[before]) <= np.abs(ranks[after] - everybody)
    found: list[int] = np.where(is_nearer, before, after).tolist()
    return found


def _wire_seconds(plan: Plan, step: Step, machine: Hardware, shape: Shape, phase: Phase) -> float:
    """How long a rank's messages take once both sides have posted them; the two links work at the same time."""
    node = plan.rank // machine.per_node
    longest = 0.0
    for link, is_here in ((machine.within, True), (machine.between, False)):
        sizes = [
            shape.total_bytes(
                (t for t in ways if t.peer != plan.rank and (t.peer // machine.per_node == node) == is_here),
                phase,
                plan.program,
            )
            for ways in (step.sends, step.recvs)
        ]
        if any(sizes):
            longest = max(longest, _on_link(link, max(sizes)))
    return longest


def _copied_bytes(plan: Plan, step: Step, shape: Shape, phase: Phase) -> int:
    """Of messages that are packed, and of gradients, which are added to what is there."""
    packed = [t for t in (*step.sends, *step.recvs) if is_packed(t)]
    added = [t for t in step.recvs if t.what in ("dq", "dkv") and not is_packed(t)]
    return sum(shape.transfer_bytes(t, phase, plan.program) for t in packed + added)


def _on_link(link: Link, size: int) -> float:
    return link.latency_s + size / link.bytes_per_s


def task_seconds(task: Task, plan: Plan, machine: Hardware, shape: Shape, phase: Phase) -> float:
    """How long the kernel takes: a launch for each kind of band there is, and what the pairs take at its speed."""
    speed = machine.forward if phase == "forward" else machine.backward
    kinds = tiled_area(task.bands, machine.tile)
    heads = plan.program.q_slots[task.q_slot].heads or shape.heads
    work = heads * flops_per_pair(shape, phase)
    return sum(machine.launch_s + area * work / _of_kind(speed, kind) for kind, area in enumerate(kinds) if area)


def flops_per_pair(shape: Shape, phase: Phase) -> int:
    """Of one head, over the batch: two products forward, over d and over e; five backward, three of them over d."""
    d, e = shape.head_dim, shape.head_dim if shape.v_dim is None else shape.v_dim
    return 2 * shape.batch * (d + e if phase == "forward" else 3 * d + 2 * e)


def _of_kind(speed: Speed, cuts: int) -> float:
    return (speed.full, speed.causal, speed.window)[cuts]


@lru_cache(maxsize=65536)
def tiled_area(bands: tuple[Band, ...], tile: int) -> tuple[float, float, float]:
    """The pairs that tiles cover: of whole rectangles, of bands that one diagonal cuts, of bands that two cut.

    In a band that is narrower than a tile, kernels take narrower tiles.
    """
    area = [0.0, 0.0, 0.0]
    for band in bands:
        cuts = band.cut_below + band.cut_above
        across = min(tile, band.hi - band.lo + 1)
        area[cuts] += band.area + cuts * across / 2 * min(band.rows, band.cols)
    return area[0], area[1], area[2]
