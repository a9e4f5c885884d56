"""The cost of the programs of all ranks from their columns: that of :func:`ringspan.costs.plan_cost.cost`, with arrays
instead of a loop over messages and bands."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.plan_cost import Cost, copying_seconds, flops_per_pair, of_kind, passes_row_bytes, tensors_of
from ringspan.costs.timeline import Loads, RankPeers, Seconds, communication_seconds, simulate
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1, area
from ringspan.plans.columns import Messages, ProgramColumns, Tasks
from ringspan.plans.data import AS_ACCUMULATED, PHASES, PayloadKind, Phase
from ringspan.plans.memory import kernel_bytes, waiting_bytes
from ringspan.plans.problem import Ints
from ringspan.plans.shape import Shape

ADDED = ("dq", "dkv")  # payloads that are added to a slot


def cost_of_columns(columns: ProgramColumns, machine: Hardware, shape: Shape) -> Cost:
    """Return the cost of the programs of all ranks."""
    work = _Work.of(columns.tasks, columns.q_slots, machine.tile)
    forward, backward = (simulate(_loads(columns, work, machine, shape, phase), machine.overlap) for phase in PHASES)
    buffers = [_buffer_bytes(columns, shape, phase) for phase in PHASES]
    taken = [_memory_bytes(columns, work, held, shape, phase) for phase, held in zip(PHASES, buffers, strict=True)]
    peak, memory = (max(int(of_phase.max(initial=0)) for of_phase in both) for both in (buffers, taken))
    ranks = tuple(range(columns.world))
    return Cost(forward=forward, backward=backward, peak_bytes=peak, memory_bytes=memory, ranks=ranks, world=columns.world)


class _Work(NamedTuple):
    """Of each task: the pairs that the kernel's tiles cover, by kind of band (see ``plan_cost.tiled_area``), the number
    of bands, the queries and keys of all bands together, the rows from the first to the last query and key, and the
    rows whose results are merged into earlier ones."""

    tiled: Seconds
    bands: Ints
    queries: Ints
    keys: Ints
    query_span: Ints
    key_span: Ints
    merged: Ints

    @staticmethod
    def of(tasks: Tasks, q_slots: Ints, tile: int) -> _Work:
        q0, q1, k0, k1, lo, hi = (tasks.bands[:, column] for column in (Q0, Q1, K0, K1, LO, HI))
        kind = (lo > k0 - q1 + 1).astype(np.int64) + (hi < k1 - 1 - q0)
        covered = area(tasks.bands) + kind * np.minimum(tile, hi - lo + 1) / 2 * np.minimum(q1 - q0, k1 - k0)
        count = np.diff(tasks.first, append=len(tasks.bands))
        task = np.repeat(np.arange(len(count)), count)
        by_kind: Seconds = np.bincount(3 * task + kind, weights=covered, minlength=3 * len(count)).astype(np.float64)
        tiled: Seconds = by_kind.reshape(-1, 3)
        if not len(count):
            return _Work(tiled, count, count, count, count, count, count)
        sides = ((q0, q1), (k0, k1))
        queries, keys = (np.add.reduceat(stop - start, tasks.first) for start, stop in sides)
        query_span, key_span = (
            np.maximum.reduceat(stop, tasks.first) - np.minimum.reduceat(start, tasks.first) for start, stop in sides
        )
        return _Work(tiled, count, queries, keys, query_span, key_span, _merged_rows(tasks, queries, q_slots))


def _merged_rows(tasks: Tasks, queries: Ints, q_slots: Ints) -> Ints:
    """Return the rows of each task whose results are merged into earlier ones: those beyond the rows of the slot."""
    slot = tasks.rank * q_slots.shape[1] + tasks.q_slot
    order = np.argsort(slot, kind="stable")
    total = np.cumsum(queries[order])  # over the tasks of one slot after the other
    first = np.diff(slot[order], prepend=-1) > 0
    before = np.maximum.accumulate(np.where(first, total - queries[order], 0))  # the first task of the slot
    beyond = np.maximum(total - before - q_slots.ravel()[slot[order]], 0)
    merged = np.empty_like(queries)
    merged[order] = np.minimum(queries[order], beyond)
    return merged


def _loads(columns: ProgramColumns, work: _Work, machine: Hardware, shape: Shape, phase: Phase) -> Loads:
    tasks, size = columns.tasks, (columns.world, columns.steps[phase])
    computing = np.zeros(size)
    computing[tasks.rank, tasks.step] = _task_seconds(work, machine, shape, phase)
    merged = work.merged * shape.row_bytes("out" if phase == "forward" else "dq", phase)
    copied = columns.per_step(tasks.rank, tasks.step, merged, phase)
    copies = columns.per_step(tasks.rank, tasks.step, (merged > 0).astype(np.int64), phase)
    sent, received = (np.zeros((2, *size), dtype=np.int64) for _ in range(2))
    for messages in columns.messages[phase]:
        total = messages.rows * shape.message_row_bytes(messages.what, phase, dkv_dtype=columns.dkv_dtype)
        is_far = (messages.sender // machine.per_node != messages.receiver // machine.per_node).astype(np.int64)
        for way, rank in ((sent, messages.sender), (received, messages.receiver)):
            np.add.at(way, (is_far, rank, messages.step), total)
        number = tensors_of(messages.what) * messages.transfers
        is_applied = np.ones_like(total) if messages.what in ADDED else messages.is_packed
        for rank, is_copied in ((messages.sender, messages.packs), (messages.receiver, is_applied)):
            copied += columns.per_step(rank, messages.step, total * is_copied, phase)
            copies += columns.per_step(rank, messages.step, number * is_copied, phase)
    peers = _peers(columns.messages[phase], size[1])
    copying = copying_seconds(copied, copies, machine)
    return Loads(computing, communication_seconds(sent, received, machine), copying, peers)


def _task_seconds(work: _Work, machine: Hardware, shape: Shape, phase: Phase) -> Seconds:
    """Return the time of each task; see :func:`ringspan.costs.plan_cost.task_seconds`."""
    speed = machine.forward if phase == "forward" else machine.backward
    flops = shape.heads * flops_per_pair(shape, phase)
    seconds = np.zeros(len(work.tiled))
    for kind, covered in enumerate(work.tiled.T):
        seconds += np.where(covered > 0, machine.launch_s + covered * flops / of_kind(speed, kind), 0.0)
    of_query, of_key = passes_row_bytes(machine, shape, phase, heads=shape.heads, kv_heads=shape.kv_heads)
    passes: Seconds = (work.queries * of_query + work.keys * of_key) / machine.copy_bytes_per_s
    return seconds + passes


def _peers(messages: tuple[Messages, ...], steps: int) -> list[RankPeers]:
    """Return which ranks exchange messages in each step, each pair in both directions."""
    step, one, other = (
        np.concatenate(column) for column in zip(*((m.step, m.sender, m.receiver) for m in messages), strict=True)
    )
    return [(np.append(one[step == n], other[step == n]), np.append(other[step == n], one[step == n])) for n in range(steps)]


def _buffer_bytes(columns: ProgramColumns, shape: Shape, phase: Phase) -> Ints:
    """Return the bytes of the buffers of each rank in each step; see :func:`ringspan.plans.memory.buffer_bytes`."""
    every, size = columns.messages[phase], (columns.world, columns.steps[phase])

    def slot_bytes(what: PayloadKind) -> Ints:
        slots = columns.kv_slots if what in ("kv", "dkv") else columns.q_slots
        total: Ints = slots.sum(axis=1) * shape.row_bytes(what, phase)
        return total

    results: tuple[PayloadKind, ...] = ("out",) if phase == "forward" else ("dq", "dkv")
    held: Ints = np.sum([slot_bytes(what) for what in ("kv", *results)], axis=0)
    for moving in (m for m in every if m.what == "q"):
        moves = np.zeros(columns.world, dtype=np.int64)
        moves[moving.sender], moves[moving.receiver] = 1, 1
        own = moves
        if phase == "forward":  # only rows that are not packed are sent from a copy
            own = np.zeros_like(moves)
            own[moving.sender[moving.is_packed == 0]] = 1
        rows = own * columns.q_slots[:, 0] + moves * columns.q_slots[:, 1:].sum(axis=1)
        held = held + rows * shape.row_bytes("q", phase)
    total = np.repeat(held[:, None], size[1], axis=1)
    for messages in every:
        what, packs = messages.what, messages.is_packed
        full = messages.rows * shape.message_row_bytes(what, phase)
        sent = messages.rows * shape.message_row_bytes(what, phase, dkv_dtype=columns.dkv_dtype)
        total += columns.per_step(messages.sender, messages.step, full * packs, phase)
        total += columns.per_step(messages.receiver, messages.step, sent if what in ADDED else sent * packs, phase)
        if what == "dkv" and columns.dkv_dtype != AS_ACCUMULATED:
            converted = columns.per_step(messages.sender, messages.step, sent, phase)
            np.maximum.at(converted, (messages.receiver, messages.step), full * packs)
            total += converted
    return total


def _memory_bytes(columns: ProgramColumns, work: _Work, held: Ints, shape: Shape, phase: Phase) -> Ints:
    """Return the peak memory of each rank; see :func:`ringspan.plans.memory.memory_bytes`."""
    tasks, taken = columns.tasks, held.copy()
    taken[tasks.rank, tasks.step] += kernel_bytes(work.query_span, work.key_span, shape, phase)

    def rows_of_several_bands(slot: Ints, slots: Ints) -> Ints:
        """Return the rank's own rows, where more than one band computes with them."""
        rows: Ints = slots[:, 0] * (np.bincount(tasks.rank, weights=work.bands * (slot == 0), minlength=columns.world) > 1)
        return rows

    queries = rows_of_several_bands(tasks.q_slot, columns.q_slots)
    keys = rows_of_several_bands(tasks.kv_slot, columns.kv_slots)
    peak: Ints = taken.max(axis=1, initial=0) + waiting_bytes(queries, keys, shape, phase)
    return peak
