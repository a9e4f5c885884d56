"""The cost of plans on a machine: seconds of compute, communication and copies of each step, and a timeline of all
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringspan.costs.hardware import Hardware, Speed
from ringspan.costs.timeline import Loads, Timeline, communication_seconds, nearest, simulate
from ringspan.masks import Band
from ringspan.plans.data import PHASES, Phase, RankPlan, Step, Task
from ringspan.plans.memory import memory_bytes, peak_bytes
from ringspan.plans.shape import Shape, check_heads_fit, is_packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The timelines of ``ranks``, which are all ranks of the world or a sample, and the largest memory of a rank.

    ``peak_bytes`` counts buffers. ``memory_bytes`` also counts what the kernel allocates.
    """

    forward: Timeline
    backward: Timeline
    peak_bytes: int
    memory_bytes: int
    ranks: tuple[int, ...]
    world: int

    @property
    def is_exact(self) -> bool:
        """Whether every rank was simulated, so that only the model of the machine is an estimate."""
        return len(self.ranks) == self.world

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def exposed_s(self) -> float:
        """The largest time of a rank that is not compute: waiting for messages, copies, merging, contention."""
        return float((self.forward.exposed + self.backward.exposed).max(initial=0.0))


def cost(plans: Sequence[RankPlan], machine: Hardware, shape: Shape) -> Cost:
    """Return the cost of the plans of all ranks, or of a sample of ranks, in rank order. The plans must fit the heads
    of the shape."""
    for plan in plans:
        check_heads_fit(plan, shape)
    forward, backward = (simulate(_loads(plans, machine, shape, phase), machine.overlap) for phase in PHASES)
    peak, memory = (max(of(plan, shape, phase) for plan in plans for phase in PHASES) for of in (peak_bytes, memory_bytes))
    ranks = tuple(plan.rank for plan in plans)
    return Cost(forward=forward, backward=backward, peak_bytes=peak, memory_bytes=memory, ranks=ranks, world=plans[0].world)


def _loads(plans: Sequence[RankPlan], machine: Hardware, shape: Shape, phase: Phase) -> Loads:
    size = len(plans), max(len(plan.program.steps(phase)) for plan in plans)
    computing, copied = np.zeros(size), np.zeros(size)
    sent, received = (np.zeros((2, *size), dtype=np.int64) for _ in range(2))
    exchanging: list[set[tuple[int, int]]] = [set() for _ in range(size[1])]
    row_of = nearest(np.array([plan.rank for plan in plans]), plans[0].world).tolist()
    for row, plan in enumerate(plans):
        node = plan.rank // machine.per_node
        begun: set[int] = set()
        for n, step in enumerate(plan.program.steps(phase)):
            computing[row, n] = sum(task_seconds(task, plan, machine, shape, phase) for task in step.tasks)
            copied[row, n] = _copied_bytes(plan, step, shape, phase)
            for task in step.tasks:
                copied[row, n] += _merged_bytes(task, plan, shape, phase) if task.q_slot in begun else 0
                begun.add(task.q_slot)
            for way, transfers in ((sent, step.sends), (received, step.recvs)):
                away = [t for t in transfers if t.peer != plan.rank]
                exchanging[n].update((row, row_of[t.peer]) for t in away)
                for link, is_here in enumerate((True, False)):
                    there = (t for t in away if (t.peer // machine.per_node == node) == is_here)
                    way[link, row, n] = shape.total_bytes(there, phase, plan.program)
    pairs = (np.array(sorted(m), dtype=np.int64).reshape(-1, 2).T for m in exchanging)
    peers = [(rows, peer) for rows, peer in pairs]
    communication = communication_seconds(sent, received, machine)
    return Loads(computing, communication, copied / machine.copy_bytes_per_s, peers, plans[0].program.in_flight)


def _copied_bytes(plan: RankPlan, step: Step, shape: Shape, phase: Phase) -> int:
    """Return the bytes of messages that are packed, and of gradients that are added to a slot. Rows that are sent to
    several peers are packed once."""
    sent = {(t.what, t.slot, t.rows, t.heads): t for t in step.sends if is_packed(t)}
    received = [t for t in step.recvs if is_packed(t) or t.what in ("dq", "dkv")]
    return shape.total_bytes([*sent.values(), *received], phase, plan.program)


def _merged_bytes(task: Task, plan: RankPlan, shape: Shape, phase: Phase) -> int:
    """Return the bytes of results that are merged into earlier results of the same queries, or of gradients that are
    added to earlier ones."""
    rows = max((b.q1 for b in task.bands), default=0) - min((b.q0 for b in task.bands), default=0)
    return rows * shape.row_bytes("out" if phase == "forward" else "dq", phase, plan.program.q_slots[task.q_slot].heads)


def task_seconds(task: Task, plan: RankPlan, machine: Hardware, shape: Shape, phase: Phase) -> float:
    """Return the time of the kernel: one launch for each kind of band, and the pairs at the speed of their kind."""
    speed = machine.forward if phase == "forward" else machine.backward
    kinds = plan.derived(_tiled_areas, machine.tile)[id(task)]
    heads = plan.program.q_slots[task.q_slot].heads or shape.heads
    work = heads * flops_per_pair(shape, phase)
    return sum(machine.launch_s + area * work / of_kind(speed, kind) for kind, area in enumerate(kinds) if area)


def flops_per_pair(shape: Shape, phase: Phase) -> int:
    """Return the FLOPs of one pair for one head, over the batch.

    The forward pass has two matrix products, over d and over e. The backward pass has five, three of them over d.
    """
    d, e = shape.head_dim, shape.head_dim if shape.v_dim is None else shape.v_dim
    return 2 * shape.batch * (d + e if phase == "forward" else 3 * d + 2 * e)


def rounded(seconds: float) -> float:
    """Round seconds for comparison, so that processors whose sums differ in the last bit find the same order."""
    return float(f"{seconds:.6g}")


def of_kind(speed: Speed, cuts: int) -> float:
    """Return the speed for bands that are bounded by this number of diagonals."""
    return (speed.full, speed.causal, speed.window)[cuts]


def _tiled_areas(plan: RankPlan, tile: int) -> dict[int, tuple[float, float, float]]:
    """Return the :func:`tiled_area` of each task by the id of the task, which lives as long as its plan."""
    tasks = (task for phase in PHASES for step in plan.program.steps(phase) for task in step.tasks)
    return {id(task): tiled_area(task.bands, tile) for task in tasks}


def tiled_area(bands: tuple[Band, ...], tile: int) -> tuple[float, float, float]:
    """Return the pairs that the kernel's tiles cover: of rectangles, of bands with one diagonal, of bands with two.

    In a band that is narrower than a tile, kernels use narrower tiles.
    """
    area = [0.0, 0.0, 0.0]
    for band in bands:
        cuts = band.cut_below + band.cut_above
        across = min(tile, band.hi - band.lo + 1)
        area[cuts] += band.area + cuts * across / 2 * min(band.rows, band.cols)
    return area[0], area[1], area[2]
