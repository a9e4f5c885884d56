"""How much memory a rank needs beside the tensors that come in: buffers of its own, and what a kernel takes."""

from __future__ import annotations

from ringspan.plans.data import Phase, Program, RankPlan, Step, Task, What
from ringspan.plans.shape import Shape, check_heads_fit, is_packed


def peak_bytes(plan: RankPlan, shape: Shape, phase: Phase) -> int:
    """The most memory a phase holds in buffers of its own, in any step."""
    return max(buffer_bytes(plan, shape, phase), default=0)


def buffer_bytes(plan: RankPlan, shape: Shape, phase: Phase) -> list[int]:
    """What each step holds in buffers of its own: slots, accumulators, and messages packed or waiting to be added.

    The tensors that come in and the kernels' own scratch space are not counted.
    """
    check_heads_fit(plan, shape)
    program = plan.program
    held = sum(shape.slot_bytes(slot, "kv", phase) for slot in program.kv_slots)
    if program.moves_queries(phase):  # they travel from a copy that lies row by row
        held += sum(shape.slot_bytes(slot, "q", phase) for slot in program.q_slots)
    results: tuple[What, ...] = ("out",) if phase == "forward" else ("dq", "dkv")
    for what in results:
        held += sum(shape.slot_bytes(slot, what, phase) for slot in (program.kv_slots if what == "dkv" else program.q_slots))

    def messages(step: Step) -> int:
        apart = [t for t in step.sends if is_packed(t)]
        apart += [t for t in step.recvs if t.peer != plan.rank and (is_packed(t) or t.what in ("dq", "dkv"))]
        return shape.total_bytes(apart, phase, program)

    return [held + messages(step) for step in program.steps(phase)]


def memory_bytes(plan: RankPlan, shape: Shape, phase: Phase) -> int:
    """The most memory a phase holds in any step, beside the tensors that come in and go out: its buffers, what the kernel
    takes, and results that wait to be merged."""
    steps = zip(plan.program.steps(phase), buffer_bytes(plan, shape, phase), strict=True)
    taken = (held + max((_kernel_bytes(task, plan.program, shape, phase) for task in s.tasks), default=0) for s, held in steps)
    return max(taken, default=0) + _waiting_bytes(plan.program, shape, phase)


def _waiting_bytes(program: Program, shape: Shape, phase: Phase) -> int:
    """Results of home as a kernel gave them, which wait for others of the same rows: at most one for each row.

    They do so in half precision only, and where a row may have several: of how many bands a kernel makes one launch, a plan
    does not know.
    """
    if shape.item == shape.wide_item:
        return 0
    tasks = [task for step in program.steps(phase) for task in step.tasks]
    bands_of_queries = sum(len(task.bands) for task in tasks if task.q_slot == 0)
    bands_of_keys = sum(len(task.bands) for task in tasks if task.kv_slot == 0)
    d, e = shape.head_dim, shape.head_dim if shape.v_dim is None else shape.v_dim
    queries, keys = program.q_slots[0], program.kv_slots[0]
    of_query = e * shape.item + shape.wide_item if phase == "forward" else d * shape.item
    waiting = queries.rows * (queries.heads or shape.heads) * of_query if bands_of_queries > 1 else 0
    if phase == "backward" and bands_of_keys > 1:
        waiting += keys.rows * (keys.heads or shape.kv_heads) * (d + e) * shape.item
    return shape.batch * waiting


def _kernel_bytes(task: Task, program: Program, shape: Shape, phase: Phase) -> int:
    """What FlashAttention-4 takes for a task, if it does it in one launch; other kernels may take more.

    Results in the dtype of the tensors, with lse. Backward, beside them, sums in float32: for dq, for dk and dv where query
    heads share them, and two numbers for each query.
    """
    rows, keys = (max(b[i + 1] for b in task.bands) - min(b[i] for b in task.bands) if task.bands else 0 for i in (0, 2))
    heads = program.q_slots[task.q_slot].heads or shape.heads
    kv_heads = program.kv_slots[task.kv_slot].heads or shape.kv_heads
    d, e = shape.head_dim, shape.head_dim if shape.v_dim is None else shape.v_dim
    if phase == "forward":
        return shape.batch * rows * heads * (e * shape.item + shape.wide_item)
    sums = shape.wide_item if heads != kv_heads else 0
    of_queries = rows * heads * (d * (shape.item + shape.wide_item) + 2 * shape.wide_item)
    return shape.batch * (of_queries + keys * kv_heads * (d + e) * (shape.item + sums))
