"""What a plan costs on a machine: all ranks walk their steps, computing while messages travel.

A step of a rank begins when its last one has ended. Its messages start when both sides have posted them; all that a rank sends
over a link shares that link, and so does all that it receives. The step ends when its tasks are computed and its messages are
there::

    rank 0   |== compute 0 ==|=== compute 1 ===|........|== compute 2 ==|
             |~~ wire 0 ~~|  |~~~~~~~~ wire 1 ~~~~~~~~~~|                  the dots are exposed
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
from ringspan.plans.shape import Shape, peak_bytes

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
        """What each rank waits for messages that no computing hides."""
        waited: Seconds = (self.end - self.computed).sum(axis=1)
        return waited


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds and bytes of the slowest rank."""

    forward: Timeline
    backward: Timeline
    peak_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def exposed_s(self) -> float:
        """How long the rank that waits most waits for the wire."""
        return float((self.forward.exposed + self.backward.exposed).max(initial=0.0))


def cost(plans: Sequence[Plan], machine: Hardware, shape: Shape) -> Cost:
    """What the plans of all ranks cost together."""
    fitted = [plan.for_heads(shape.heads, shape.kv_heads) for plan in plans]
    forward, backward = (_walk(fitted, machine, shape, phase) for phase in PHASES)
    peak = max(peak_bytes(plan, shape, phase) for plan in fitted for phase in PHASES)
    return Cost(forward=forward, backward=backward, peak_bytes=peak)


def _walk(plans: Sequence[Plan], machine: Hardware, shape: Shape, phase: Phase) -> Timeline:
    world, steps = len(plans), max(len(plan.program.steps(phase)) for plan in plans)
    begin, computed, end = (np.zeros((world, steps)) for _ in range(3))
    now = np.zeros(world)
    for n in range(steps):
        arrived = now.copy()
        begin[:, n] = now
        for rank, plan in enumerate(plans):
            mine = plan.program.steps(phase)
            if n >= len(mine):
                continue
            computed[rank, n] = sum(task_seconds(task, plan, machine, shape, phase) for task in mine[n].tasks)
            wire = _wire_seconds(plan, mine[n], machine, shape, phase)
            if wire:
                peers = {t.peer for t in (*mine[n].sends, *mine[n].recvs)} | {rank}
                arrived[rank] = max(now[peer] for peer in peers) + wire
        computed[:, n] += now
        now = np.maximum(computed[:, n], arrived)
        end[:, n] = now
    return Timeline(begin, computed, end)


def _wire_seconds(plan: Plan, step: Step, machine: Hardware, shape: Shape, phase: Phase) -> float:
    """How long a rank's messages take once both sides have posted them; the two links work at the same time."""
    node = plan.rank // machine.per_node
    longest = 0.0
    for link, is_here in ((machine.within, True), (machine.between, False)):
        sizes = [
            sum(
                shape.transfer_bytes(t, phase, plan.program)
                for t in ways
                if t.peer != plan.rank and (t.peer // machine.per_node == node) == is_here
            )
            for ways in (step.sends, step.recvs)
        ]
        if any(sizes):
            longest = max(longest, _on_link(link, max(sizes)))
    return longest


def _on_link(link: Link, size: int) -> float:
    return link.latency_s + size / link.bytes_per_s


def task_seconds(task: Task, plan: Plan, machine: Hardware, shape: Shape, phase: Phase) -> float:
    """How long the kernel takes: a launch for each kind of band there is, and what the pairs take at its speed."""
    speed = machine.forward if phase == "forward" else machine.backward
    kinds = _tiled_area(task.bands, machine.tile)
    heads = plan.program.q_slots[task.q_slot].heads or shape.heads
    d, e = shape.head_dim, shape.head_dim if shape.v_dim is None else shape.v_dim
    # Two products forward, over d and over e; five backward, three of them over d.
    work = 2 * shape.batch * heads * (d + e if phase == "forward" else 3 * d + 2 * e)
    return sum(machine.launch_s + area * work / _of_kind(speed, kind) for kind, area in enumerate(kinds) if area)


def _of_kind(speed: Speed, cuts: int) -> float:
    return (speed.full, speed.causal, speed.window)[cuts]


@lru_cache(maxsize=65536)
def _tiled_area(bands: tuple[Band, ...], tile: int) -> tuple[float, float, float]:
    """The pairs that tiles cover: of whole rectangles, of bands that one diagonal cuts, of bands that two cut."""
    area = [0.0, 0.0, 0.0]
    for band in bands:
        cuts = band.cut_below + band.cut_above
        area[cuts] += band.area + cuts * tile / 2 * min(band.rows, band.cols)
    return area[0], area[1], area[2]
