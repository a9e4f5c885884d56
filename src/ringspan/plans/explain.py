"""A plan as text: the choice, and the messages and the work of each step."""

from __future__ import annotations

from ringspan.layouts import areas
from ringspan.plans.data import PHASES, Phase, RankPlan, Step, Transfer
from ringspan.plans.memory import buffer_bytes, kept_bytes
from ringspan.plans.shape import EXAMPLE, Shape, bytes_moved, check_heads_fit, check_shape


def explain(plan: RankPlan, shape: Shape | None = None) -> str:
    """Return the plan of one rank as text: the choice, its balance, and the messages and the work of each step.

    Bytes depend on the tensors. Without a shape they are those of an example, 32 query heads and 8 key heads of dim 128
    in bfloat16, and the text says so. The plan must fit the heads of the shape.
    """
    example = " (an example; explain(shape) is about yours)" if shape is None else ""
    shape = EXAMPLE if shape is None else check_shape(shape)
    check_heads_fit(plan, shape)
    q_len, k_len = plan.mask.lengths
    lines = [
        f"plan {plan.digest}: rank {plan.rank} of {plan.world}",
        f"  mask      {plan.mask.name}: {q_len:,} × {k_len:,}, area {plan.mask.area:,}, "
        f"{len(plan.mask):,} band{'s' * (len(plan.mask) != 1)}",
        f"  tokens    {plan.q_rows:,} queries, {plan.kv_rows:,} keys here{_balance(plan)}",
        f"  work      {plan.work:.3f} × the mean of all ranks{_heads(plan)}",
        *([f"  messages  dkv is sent in {plan.program.dkv_dtype}"] if plan.program.rounds_dkv else []),
        *(f"  {'choice' if n == 0 else '':10}{note}" for n, note in enumerate(plan.notes)),
        f"  tensors   {shape.words}{example}",
    ]
    for phase in PHASES:
        lines += ["", *_phase(plan, shape, phase)]
        if phase == "forward" and plan.program.keeps_rows:
            how = "besides" if plan.program.own_rows_read else "in place of"
            lines.append(f"kept for the backward pass, {how} own rows: {kept_bytes(plan, shape):,} bytes")
    return "\n".join(lines)


def _balance(plan: RankPlan) -> str:
    """Describe how evenly the layout splits the pairs. Return no text if the strategy splits heads instead."""
    if plan.program.heads is not None:
        return ""
    per_rank = areas(plan.mask, plan.q_layout)
    even = per_rank.sum() / plan.world
    return f"; balance {per_rank.max() / even if even else 1.0:.3f} (largest rank ÷ mean)"


def _heads(plan: RankPlan) -> str:
    if plan.program.heads is None:
        return ""
    slots = {task.q_slot for step in plan.program.forward for task in step.tasks}
    here = sum(plan.program.q_slots[slot].heads or 0 for slot in slots)
    return f"; {here} of {plan.program.heads[0]} query heads here"


def _phase(plan: RankPlan, shape: Shape, phase: Phase) -> list[str]:
    header = f"{phase:9}{'bytes out':>14}{'bytes in':>14}{'area':>16}{'bands':>8}{'buffers':>16}   messages"
    lines = [header, "-" * len(header)]
    buffers = buffer_bytes(plan, shape, phase)
    for n, step in enumerate(plan.program.steps(phase)):
        sent, received = (
            sum(shape.transfer_bytes(t, phase, plan.program) for t in ts if t.peer != plan.rank)
            for ts in (step.sends, step.recvs)
        )
        bands = sum(len(task.bands) for task in step.tasks)
        figures = f"{sent:>14,}{received:>14,}{step.area:>16,}{bands:>8}{buffers[n]:>16,}"
        lines.append(f"step {n:<4}{figures}   {_messages(plan, step)}".rstrip())
    sent, received = bytes_moved(plan, shape, phase)
    area = sum(step.area for step in plan.program.steps(phase))
    bands = sum(len(task.bands) for step in plan.program.steps(phase) for task in step.tasks)
    lines.append(f"{'total':9}{sent:>14,}{received:>14,}{area:>16,}{bands:>8}   peak buffers {max(buffers):,} bytes")
    return lines


def _messages(plan: RankPlan, step: Step) -> str:
    """Return the payloads and peers of a step. Messages of a rank to itself are left out."""
    ways = [(arrow, [t for t in ts if t.peer != plan.rank]) for arrow, ts in (("→", step.sends), ("←", step.recvs))]
    return "; ".join(
        f"{what} {arrow} {_ranks([t for t in transfers if t.what == what])}"
        for arrow, transfers in ways
        for what in dict.fromkeys(t.what for t in transfers)
    )


def _ranks(transfers: list[Transfer]) -> str:
    peers = [str(peer) for peer in dict.fromkeys(t.peer for t in transfers)]
    return "rank " + " ".join(peers) if len(peers) <= 6 else f"{len(peers)} ranks"
