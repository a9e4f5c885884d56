"""The memory that a rank needs beside its input tensors: buffers of the engine, and allocations of a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ringspan.plans.data import AS_ACCUMULATED, PayloadKind, Phase, Program, RankPlan, Side, Slot, Step, Task, side
from ringspan.plans.shape import Shape, check_heads_fit

NO_SLOT = Slot(rows=0)
Count = TypeVar("Count", int, NDArray[np.int64])  # of one rank, or of each rank


def peak_bytes(plan: RankPlan, shape: Shape, phase: Phase) -> int:
    """Return the peak of the buffers of a phase, over all steps. The plan must fit the heads of the shape."""
    return max(buffer_bytes(plan, shape, phase), default=0)


def buffer_bytes(plan: RankPlan, shape: Shape, phase: Phase) -> list[int]:
    """Return the bytes of the buffers that each step holds: slots, accumulators, and messages that are packed or still
    to be added.

    The input tensors and the kernels' scratch space are not counted, nor that lse is accumulated in float64 on CPUs: 4
    bytes more for each query and head of a slot, and 4 for the result.
    """
    check_heads_fit(plan, shape)
    program, unrounded = plan.program, replace(plan.program, dkv_dtype=AS_ACCUMULATED)
    held = sum(shape.slot_bytes(slot, what, phase) for what, slot in _row_buffers(program, phase))
    results: tuple[PayloadKind, ...] = ("out",) if phase == "forward" else ("dq", "dkv")
    for what in results:
        own, *others = program.kv_slots if what == "dkv" else program.q_slots
        held += own.rows * shape.message_row_bytes(what, phase, complete=what in program.own_results_complete)
        held += sum(shape.slot_bytes(slot, what, phase) for slot in others)

    def messages(step: Step) -> int:
        packed = [t for t in step.sends if t.is_packed]
        received = [t for t in step.recvs if t.peer != plan.rank and (t.is_packed or t.what in ("dq", "dkv"))]
        total = shape.total_bytes(packed, phase, unrounded) + shape.total_bytes(received, phase, program)
        # All rows of a slot are rounded at once, and ranges of them copied from there.
        gathered = (t for t in packed if t.complete and (len(t.rows) > 1 or t.heads is not None))
        total += shape.total_bytes(gathered, phase, unrounded)
        if program.rounds_dkv:  # in copies, made when messages are posted. Packed messages are converted back one by one
            rounded = [t for t in step.sends if t.what == "dkv" and t.peer != plan.rank]
            widened = [shape.transfer_bytes(t, phase, unrounded) for t in received if t.what == "dkv" and t.is_packed]
            total += max(shape.total_bytes(rounded, phase, program), *widened, 0)
        return total

    of_steps = [messages(step) for step in program.steps(phase)]
    return [held + sum(of_steps[max(0, n + 1 - program.in_flight) : n + 1]) for n in range(len(of_steps))]


def _row_buffers(program: Program, phase: Phase) -> Iterator[tuple[PayloadKind, Slot]]:
    """Yield the buffers of rows that a phase has. Rows that are kept are inputs of the backward pass.

    Own rows that the backward pass does not read are counted all the same where nothing is kept. They are few, and the
    columns of a strategy do not say which they are.
    """
    own_kv, *received_kv = program.kv_slots
    if phase == "forward" or "kv" in program.own_rows_read or not program.keeps_rows:
        yield "kv", own_kv  # keys and values, side by side
    yield from (("kv", slot) for slot in received_kv if phase == "forward" or not slot.kept)
    if ("q", phase) in program.moving:
        own_q, *received_q = program.q_slots
        if phase == "backward" or ("q", phase) in program.sent_in_place:
            yield "q", own_q
        yield from (("q", slot) for slot in received_q if phase == "forward" or not slot.kept)
    if ("dout", phase) in program.moving:
        yield from (("dout", slot) for n, slot in enumerate(program.q_slots) if n == 0 or slot.kept)


def kept_bytes(plan: RankPlan, shape: Shape) -> int:
    """Return the bytes that are kept between the passes: queries with their out and lse, and keys."""
    program, e = plan.program, shape.head_dim if shape.v_dim is None else shape.v_dim
    total = sum(shape.slot_bytes(slot, "kv", "forward") for slot in program.kv_slots if slot.kept)
    for slot in (slot for slot in program.q_slots if slot.kept):
        out_and_lse = e * shape.item + shape.accumulator_item
        total += shape.slot_bytes(slot, "q", "forward")
        total += slot.rows * shape.batch * (shape.heads if slot.heads is None else slot.heads) * out_and_lse
    return total


def memory_bytes(plan: RankPlan, shape: Shape, phase: Phase) -> int:
    """Return the peak memory of a phase, over all steps, without inputs and results.

    It consists of the buffers, the allocations of the kernel, and partial results that are not merged yet. The plan
    must fit the heads of the shape.
    """
    steps = zip(plan.program.steps(phase), buffer_bytes(plan, shape, phase), strict=True)
    taken = (held + max((_task_bytes(task, plan.program, shape, phase) for task in s.tasks), default=0) for s, held in steps)
    return max(taken, default=0) + _waiting_bytes(plan.program, shape, phase)


def _waiting_bytes(program: Program, shape: Shape, phase: Phase) -> int:
    bands_of: dict[Side, Counter[int]] = {"q": Counter(), "kv": Counter()}
    for task in (task for step in program.steps(phase) for task in step.tasks):
        bands_of["q"][task.q_slot] += len(task.bands)
        bands_of["kv"][task.kv_slot] += len(task.bands)
    complete = {(side(what), n) for what, n in program.sent_complete}
    slots_of: tuple[tuple[Side, tuple[Slot, ...]], ...] = (("q", program.q_slots), ("kv", program.kv_slots))
    total = 0
    for n in range(max(len(program.q_slots), len(program.kv_slots))):
        queries, keys = (
            slots[n] if n < len(slots) and bands_of[of][n] > 1 and (n == 0 or (of, n) in complete) else NO_SLOT
            for of, slots in slots_of
        )
        total += waiting_bytes(queries.rows, keys.rows, shape, phase, heads=queries.heads, kv_heads=keys.heads)
    return total


def waiting_bytes(
    queries: Count, keys: Count, shape: Shape, phase: Phase, *, heads: int | None = None, kv_heads: int | None = None
) -> Count:
    """Return the bytes of partial results that wait for a second one, at most one for each row.

    They exist only in half precision, for own rows and those of slots whose results are sent complete. ``queries`` and
    ``keys`` are the rows that may get several. A plan does not know how many bands a kernel computes in one launch, so
    every band counts as one partial result.
    """
    if shape.item == shape.accumulator_item:
        return 0 * queries
    d, e = shape.head_dim, shape.head_dim if shape.v_dim is None else shape.v_dim
    of_query = e * shape.item + shape.accumulator_item if phase == "forward" else d * shape.item
    waiting = queries * (heads or shape.heads) * of_query
    if phase == "backward":
        waiting = waiting + keys * (kv_heads or shape.kv_heads) * (d + e) * shape.item
    return shape.batch * waiting


def _task_bytes(task: Task, program: Program, shape: Shape, phase: Phase) -> int:
    rows, keys = (max(b[i + 1] for b in task.bands) - min(b[i] for b in task.bands) if task.bands else 0 for i in (0, 2))
    heads, kv_heads = program.q_slots[task.q_slot].heads, program.kv_slots[task.kv_slot].heads
    return kernel_bytes(rows, keys, shape, phase, heads=heads, kv_heads=kv_heads)


def kernel_bytes(
    rows: Count, keys: Count, shape: Shape, phase: Phase, *, heads: int | None = None, kv_heads: int | None = None
) -> Count:
    """Return the bytes that FlashAttention-4 allocates for a task of so many queries and keys that it computes in one
    launch. Other kernels may allocate more.

    Forward: the results in the dtype of the tensors, and lse. Backward: the gradients, float32 sums for dq, for dk and
    dv where query heads share them, and two numbers for each query.
    """
    heads, kv_heads = heads or shape.heads, kv_heads or shape.kv_heads
    d, e = shape.head_dim, shape.head_dim if shape.v_dim is None else shape.v_dim
    if phase == "forward":
        return shape.batch * rows * heads * (e * shape.item + shape.accumulator_item)
    sums = shape.accumulator_item if heads != kv_heads else 0
    of_queries = rows * heads * (d * (shape.item + shape.accumulator_item) + 2 * shape.accumulator_item)
    return shape.batch * (of_queries + keys * kv_heads * (d + e) * (shape.item + sums))
