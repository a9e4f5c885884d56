"""The cost of plans on a machine: seconds of compute, communication and copies of each step, and a timeline of all
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.costs.hardware import Hardware, Speed
from ringspan.costs.timeline import Loads, Seconds, Timeline, communication_seconds, nearest, simulate
from ringspan.masks import Band
from ringspan.plans.data import PHASES, PayloadKind, Phase, RankPlan, Step, Task
from ringspan.plans.memory import memory_bytes, peak_bytes
from ringspan.plans.shape import Shape, check_heads_fit


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
        """The largest time of a rank that is not compute: waiting for messages, copies and merging with their launches,
        contention. The passes of a kernel over rows are compute."""
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
    computing, copied, copies = np.zeros(size), np.zeros(size), np.zeros(size)
    sent, received = (np.zeros((2, *size), dtype=np.int64) for _ in range(2))
    exchanging: list[set[tuple[int, int]]] = [set() for _ in range(size[1])]
    row_of = nearest(np.array([plan.rank for plan in plans]), plans[0].world).tolist()
    for row, plan in enumerate(plans):
        node = plan.rank // machine.per_node
        merging = _Merging(plan, shape, phase)
        for n, step in enumerate(plan.program.steps(phase)):
            computing[row, n] = sum(task_seconds(task, plan, machine, shape, phase) for task in step.tasks)
            of_step = [_copies(plan, step, shape, phase), *(merging.add(task) for task in step.tasks)]
            copied[row, n], copies[row, n] = (sum(of) for of in zip(*of_step, strict=True))
            for way, transfers in ((sent, step.sends), (received, step.recvs)):
                away = [t for t in transfers if t.peer != plan.rank]
                exchanging[n].update((row, row_of[t.peer]) for t in away)
                for link, is_here in enumerate((True, False)):
                    there = (t for t in away if (t.peer // machine.per_node == node) == is_here)
                    way[link, row, n] = shape.total_bytes(there, phase, plan.program)
    pairs = (np.array(sorted(m), dtype=np.int64).reshape(-1, 2).T for m in exchanging)
    peers = [(rows, peer) for rows, peer in pairs]
    communication = communication_seconds(sent, received, machine)
    copying = copying_seconds(copied, copies, machine)
    return Loads(computing, communication, copying, peers, plans[0].program.in_flight)


class Copies(NamedTuple):
    """Bytes that a rank copies in a step, and the number of copies."""

    size: int
    number: int


def copying_seconds(size: Seconds | NDArray[np.int64], number: Seconds | NDArray[np.int64], machine: Hardware) -> Seconds:
    """Return the time of copies: a launch for each, and their bytes."""
    seconds: Seconds = number * machine.copy_launch_s + size / machine.copy_bytes_per_s
    return seconds


def _copies(plan: RankPlan, step: Step, shape: Shape, phase: Phase) -> Copies:
    """Return the copies of messages that are packed, and of gradients that are added to a slot. Rows that are sent to
    several peers are packed once."""
    sent = {(t.what, t.slot, t.rows, t.heads, t.complete): t for t in step.sends if t.is_packed}
    received = [t for t in step.recvs if t.is_packed or t.what in ("dq", "dkv")]
    copied = [*sent.values(), *received]
    return Copies(shape.total_bytes(copied, phase, plan.program), sum(tensors_of(t.what) for t in copied if t.count))


def tensors_of(what: PayloadKind) -> int:
    """Return the number of tensors of a slot that one message has: each is a copy of its own."""
    return 2 if what == "out" else 1  # out and lse


class _Merging:
    """Counts the results that are merged into earlier results of the same queries, and the gradients that are added to
    earlier ones: all rows of bands beyond the rows of their slot."""

    def __init__(self, plan: RankPlan, shape: Shape, phase: Phase) -> None:
        self._slots = plan.program.q_slots
        what: PayloadKind = "out" if phase == "forward" else "dq"
        self._row_bytes = [shape.row_bytes(what, phase, slot.heads) for slot in self._slots]
        self._computed = [0] * len(self._slots)

    def add(self, task: Task) -> Copies:
        """Return what is merged after this task."""
        n, rows = task.q_slot, sum(band.rows for band in task.bands)
        self._computed[n] += rows
        merged = min(rows, max(self._computed[n] - self._slots[n].rows, 0))
        return Copies(merged * self._row_bytes[n], int(merged > 0))


def task_seconds(task: Task, plan: RankPlan, machine: Hardware, shape: Shape, phase: Phase) -> float:
    """Return the time of the kernel: one launch for each kind of band, the pairs at the speed of their kind, and the
    passes over the rows."""
    speed = machine.forward if phase == "forward" else machine.backward
    tiled, queries, keys = plan.derived(_task_sizes, machine.tile)[id(task)]
    heads = plan.program.q_slots[task.q_slot].heads or shape.heads
    kv_heads = plan.program.kv_slots[task.kv_slot].heads or shape.kv_heads
    work = heads * flops_per_pair(shape, phase)
    seconds = sum(machine.launch_s + area * work / of_kind(speed, kind) for kind, area in enumerate(tiled) if area)
    of_query, of_key = passes_row_bytes(machine, shape, phase, heads=heads, kv_heads=kv_heads)
    return seconds + (queries * of_query + keys * of_key) / machine.copy_bytes_per_s


def passes_row_bytes(machine: Hardware, shape: Shape, phase: Phase, *, heads: int, kv_heads: int) -> tuple[float, float]:
    """Return the bytes of copies that take as long as a kernel's passes over one query and over one key, before and
    after its backward pass over the pairs (see :class:`ringspan.costs.Hardware`)."""
    if phase == "forward":
        return 0.0, 0.0
    of_key = shape.row_bytes("kv", phase, kv_heads) * machine.key_passes if heads != kv_heads else 0.0
    return shape.row_bytes("q", "forward", heads) * machine.query_passes, of_key


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


class _TaskSize(NamedTuple):
    """The :func:`tiled_area` of a task, and the queries and keys of all its bands together."""

    tiled: tuple[float, float, float]
    queries: int
    keys: int


def _task_sizes(plan: RankPlan, tile: int) -> dict[int, _TaskSize]:
    """Return the sizes of each task by the id of the task, which lives as long as its plan."""
    tasks = (task for phase in PHASES for step in plan.program.steps(phase) for task in step.tasks)
    return {
        id(task): _TaskSize(tiled_area(task.bands, tile), sum(b.rows for b in task.bands), sum(b.cols for b in task.bands))
        for task in tasks
    }


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
