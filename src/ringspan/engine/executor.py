"""The executor: a generator for the forward pass of one rank, and one for its backward pass.

Both run the steps of a plan. They yield the exchanges, and the transport that drives a generator performs them. The
messages of a step overlap with its kernel calls. A step without remote messages yields nothing::

    yield PostExchange ──► kernel, accumulate ──► yield WaitExchange ──► apply what has arrived

If the program has several exchanges in flight, the last two are those of an earlier step.

Slots and messages are rows first (S, B, H, D). Kernels get (B, H, S, D) views. Key and value of a token are stored in
one row, so a contiguous range of rows with all heads is sent without a copy.

Legend: S queries, T keys, B batch, H query heads, G key heads, D head dim, E value dim, F = D + E.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from ringspan.debugging.settings import settings
from ringspan.engine.finite import check_inputs_finite, check_results_finite
from ringspan.engine.global_indices import indexed_mods
from ringspan.engine.messages import StepMessages, schedule
from ringspan.engine.packing import pack_saved, unpack_saved
from ringspan.engine.pass_cache import run_pass
from ringspan.engine.slots import Slots
from ringspan.kernels import GradientAccumulator, Kernel, Mods, OutputAccumulator, Saved, accumulation_dtype, max_logits
from ringspan.planner import Plan
from ringspan.plans import Slot, Task
from ringspan.plans.data import DkvDtype, PayloadKind, Phase
from ringspan.torch_private.profiler import profiler_enabled
from ringspan.transports import CallDescription, RankGenerator, WaitExchange
from ringspan.transports.collectives import all_gather_by_messages

# Drives the generators of the ranks of this process to their results: ``transport.run``. The second argument is what
# must be equal on all ranks.
Run = Callable[[Sequence[Any], CallDescription | None], list[Any]]

# None: that of the accumulators.
DKV_MESSAGE_DTYPES: dict[DkvDtype, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}

NO_SPAN = nullcontext()  # opening a span of the profiler takes as long as a kernel launch


class Pass(NamedTuple):
    """The buffers of a forward or backward pass, the function that computes a task, and the one that returns the
    result."""

    slots: Slots
    compute: Callable[[Task, int], None]
    """Computes a task of the step of this number."""
    finish: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The settings of one call of attention, which are the same for all ranks and all steps."""

    kernel: Kernel
    scale: float
    head_dim: int
    mods: Mods | None = None
    max_logits: bool = False
    """Whether the forward pass also returns the largest logit of each head, over all ranks."""
    forward_call: CallDescription | None = None
    """What must be equal on all ranks; None if they are not in different processes."""
    backward_call: CallDescription | None = None
    cuda_graphs: bool = False
    """Whether recorded passes are captured in CUDA graphs (:mod:`ringspan.engine.graph_replay`)."""


def forward(plan: Plan, q_SBHD: Tensor, kv_TBGF: Tensor, config: AttentionConfig) -> RankGenerator[tuple[Tensor, ...]]:
    """Return the generator of a rank's forward pass.

    Its result is out (S, B, H, E) and lse (S, B, H). Out has the kernel's dtype if the accumulator still borrows a
    tensor of the kernel (:mod:`ringspan.kernels.accumulators`), else the accumulation dtype. With ``config.max_logits``
    the largest logit of each head (H,) is added to them.
    """
    execute = partial(run_steps, plan, "forward", partial(_prepare_forward, plan, q_SBHD, kv_TBGF, config))
    if config.max_logits:
        execute = partial(_largest_of_ranks, plan, execute)
    if config.mods is not None or not hasattr(config.kernel, "observed_launches"):
        return execute()
    options, inputs = (config.scale, config.head_dim, config.max_logits), (q_SBHD, kv_TBGF)
    return run_pass(plan, "forward", config.kernel, options, inputs, execute, cuda_graphs=config.cuda_graphs)


def _largest_of_ranks(
    plan: Plan, execute: Callable[[], RankGenerator[tuple[Tensor, ...]]]
) -> RankGenerator[tuple[Tensor, ...]]:
    """Run a forward pass, and replace the largest logits of this rank's tasks by those of all ranks."""
    out, lse, largest_H = yield from execute()
    if plan.world > 1:
        counts = [len(largest_H)] * plan.world
        of_ranks = yield from all_gather_by_messages(largest_H, counts, plan.rank, "max logits")
        largest_H = torch.stack(of_ranks).amax(0)
    return out, lse, largest_H


def _prepare_forward(plan: Plan, q_SBHD: Tensor, kv_TBGF: Tensor, config: AttentionConfig) -> Pass:
    program, head_dim = plan.program, config.head_dim
    if settings.debug:
        check_inputs_finite(plan, "forward", {"q": q_SBHD, "k": kv_TBGF[..., :head_dim], "v": kv_TBGF[..., head_dim:]})
    # Queries that move are sent from a contiguous copy; otherwise the kernel reads them in place.
    if program.moves_queries("forward"):
        q_rows = _slot_buffers(q_SBHD.contiguous(), program.q_slots)
    else:
        q_rows = [q_SBHD if q_SBHD.stride(-1) == 1 else q_SBHD.contiguous()]
    kv_rows = _slot_buffers(kv_TBGF, program.kv_slots)
    value_dim = kv_TBGF.shape[-1] - head_dim
    like = torch.empty(0, dtype=accumulation_dtype(q_SBHD.dtype), device=q_SBHD.device)
    queries, keys = [], []
    outputs: list[OutputAccumulator] = []
    for x_SBHD in q_rows:
        queries.append(x_SBHD.movedim(0, 2))
        outputs.append(OutputAccumulator((*x_SBHD.shape[:3], value_dim), like=like, reuse_kernel_output=not outputs))
    for x_TBGF in kv_rows:
        kv_BGTF = x_TBGF.movedim(0, 2)
        keys.append((kv_BGTF[..., :head_dim], kv_BGTF[..., head_dim:]))
    options: dict[str, Any] = {"scale": config.scale}
    largest: tuple[Tensor, ...] = (like.new_full(q_SBHD.shape[2:3], -torch.inf),) if config.max_logits else ()

    def compute(task: Task, step: int) -> None:
        if config.mods is not None:
            options["mods"] = indexed_mods(config.mods, plan, task, like.device)
        k_BGTD, v_BGTE = keys[task.kv_slot]
        for largest_H in largest:
            of_task = max_logits(config.kernel, queries[task.q_slot], k_BGTD, task.bands, **options)
            so_far = largest_H.narrow(0, plan.task_tokens(task, "q").first_head, len(of_task))
            so_far.copy_(torch.maximum(so_far, of_task))
        for start, stop, (out, lse) in config.kernel.attend(queries[task.q_slot], k_BGTD, v_BGTE, task.bands, **options):
            if settings.debug:
                found = {"out": (start, out.movedim(2, 0)), "lse": (start, lse.movedim(2, 0))}
                check_results_finite(plan, "forward", step, task, config.kernel, found)
            outputs[task.q_slot].add(start, stop, out.movedim(2, 0), lse.movedim(2, 0))
            del out, lse  # else they would be held while the next are computed

    slots = Slots({"q": q_rows, "kv": kv_rows}, outputs=outputs)
    finish = outputs[0].finish if not largest else lambda: (*outputs[0].finish(), *largest)
    return Pass(slots, compute, finish)


class BackwardInputs(NamedTuple):
    """What the backward pass gets of the queries, rows first. A dout or dlse of None is zero."""

    q_SBHD: Tensor
    out_SBHE: Tensor
    lse_SBH: Tensor
    dout_SBHE: Tensor | None
    dlse_SBH: Tensor | None


def backward(plan: Plan, given: BackwardInputs, kv_TBGF: Tensor, config: AttentionConfig) -> RankGenerator[tuple[Tensor, ...]]:
    """Return the generator of a rank's backward pass.

    Its result is dq (S, B, H, D), dk (T, B, G, D) and dv (T, B, G, E), with dtypes as in :func:`forward`, and this
    rank's contribution to the gradients of the captured tensors that require one (``Mods.learned``). All of them are
    computed on every rank, needed or not: a rank that skipped a gradient would leave its peers with unmatched receives.
    """
    execute = partial(run_steps, plan, "backward", partial(_prepare_backward, plan, given, kv_TBGF, config))
    if config.mods is not None or not hasattr(config.kernel, "observed_launches"):
        return execute()
    options, inputs = (config.scale, config.head_dim), (*given, kv_TBGF)
    return run_pass(plan, "backward", config.kernel, options, inputs, execute, cuda_graphs=config.cuda_graphs)


def _prepare_backward(plan: Plan, given: BackwardInputs, kv_TBGF: Tensor, config: AttentionConfig) -> Pass:
    program, mods, head_dim = plan.program, config.mods, config.head_dim
    value_dim = kv_TBGF.shape[-1] - head_dim
    q, dout, out, lse, dlse = _saved(given)
    del given
    if settings.debug:
        check_inputs_finite(plan, "backward", {"dout": dout, "dlse": dlse})
    q, dout, out = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, dout, out)]
    # Queries that move are sent with all that their gradient needs, in one row; those that stay need no such copy.
    q_rows: list[Tensor] = []
    if program.moves_queries("backward"):
        q_rows = _slot_buffers(pack_saved(Saved(q, dout, out, lse, dlse)), program.q_slots)
    kv_rows = _slot_buffers(kv_TBGF, program.kv_slots)
    like = torch.empty(0, dtype=accumulation_dtype(kv_TBGF.dtype), device=kv_TBGF.device)
    queries = [_heads_first(q, dout, out, lse, dlse)]
    dq = [GradientAccumulator(q.shape[:3], (head_dim,), like=like, reuse_kernel_output=True)]
    for rows in q_rows[1:]:
        queries.append(_heads_first(*unpack_saved(rows, head_dim, value_dim)))
        dq.append(GradientAccumulator(rows.shape[:3], (head_dim,), like=like))
    keys: list[tuple[Tensor, Tensor]] = []
    dkv: list[GradientAccumulator] = []
    for x_TBGF in kv_rows:
        kv_BGTF = x_TBGF.movedim(0, 2)
        keys.append((kv_BGTF[..., :head_dim], kv_BGTF[..., head_dim:]))
        dkv.append(GradientAccumulator(x_TBGF.shape[:3], (head_dim, value_dim), like=like, reuse_kernel_output=not dkv))
    dlearned = [] if mods is None else [torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in mods.learned]
    options: dict[str, Any] = {"scale": config.scale}

    def compute(task: Task, step: int) -> None:
        if mods is not None:
            options["mods"] = indexed_mods(mods, plan, task, like.device)
        k_BGTD, v_BGTE = keys[task.kv_slot]
        for grads in config.kernel.attend_backward(queries[task.q_slot], k_BGTD, v_BGTE, task.bands, **options):
            dq_SBHD, dk_TBGD, dv_TBGE = (x.movedim(2, 0) for x in (grads.dq_BHSD, grads.dk_BGTD, grads.dv_BGTE))
            if settings.debug:
                found = {
                    "dq": (grads.rows.start, dq_SBHD),
                    "dk": (grads.keys.start, dk_TBGD),
                    "dv": (grads.keys.start, dv_TBGE),
                }
                check_results_finite(plan, "backward", step, task, config.kernel, found)
            dq[task.q_slot].add(grads.rows.start, grads.rows.stop, dq_SBHD)
            dkv[task.kv_slot].add(grads.keys.start, grads.keys.stop, dk_TBGD, dv_TBGE)
            for total, grad in zip(dlearned, grads.dlearned, strict=True):
                total.add_(grad)
            del grads, dq_SBHD, dk_TBGD, dv_TBGE  # else they would be held while the next are computed

    def finish() -> tuple[Tensor, ...]:
        return *dq[0].finish(), *dkv[0].finish(), *dlearned

    slots = Slots(
        {"q": q_rows, "kv": kv_rows}, gradients={"dq": dq, "dkv": dkv}, dkv_dtype=DKV_MESSAGE_DTYPES[program.dkv_dtype]
    )
    return Pass(slots, compute, finish)


class InFlight(NamedTuple):
    """The messages of a step, None if it has none, and the transport's handle of their exchange."""

    messages: StepMessages | None
    pending: Any
    is_last: bool
    """Whether it is the last step of the pass."""


def run_steps(
    plan: Plan, phase: Phase, prepare: Callable[[], Pass], *, only: PayloadKind | None = None
) -> RankGenerator[tuple[Tensor, ...]]:
    """Exchange the messages of each step while its tasks are computed. ``only`` restricts the messages to one kind.

    The buffers are allocated when the transport starts the generator. If memory runs out, the transport reports the
    error to the other ranks.
    """
    slots, compute, finish = prepare()
    del prepare  # it holds tensors that may have been copied
    in_flight: deque[InFlight] = deque()
    steps = plan.derived(schedule, phase, only)
    for step in steps:
        pending = None
        if step.messages is not None:
            exchange = slots.begin(step.messages, step.label)
            if step.messages.is_on_wire:
                pending = yield exchange
            del exchange  # it holds the messages of this step
        in_flight.append(InFlight(step.messages, pending, step is steps[-1]))
        del pending  # else the next step's messages would be packed while this step's are still held
        with record_function(f"ringspan::step {step.number} {phase}, rank {plan.rank}") if profiler_enabled() else NO_SPAN:
            for task in step.tasks:
                compute(task, step.number)
        if len(in_flight) == plan.program.in_flight:
            yield from _complete_oldest(slots, in_flight)
    while in_flight:
        yield from _complete_oldest(slots, in_flight)
    return finish()


def _complete_oldest(slots: Slots, in_flight: deque[InFlight]) -> RankGenerator[None]:
    """Wait for the messages of the oldest step in flight, and apply them."""
    messages, pending, is_last = in_flight.popleft()
    if messages is None:
        return
    if messages.is_on_wire:
        yield WaitExchange(pending)
    del pending  # it may hold buffers
    slots.apply_arrivals(is_last=is_last)


def _saved(given: BackwardInputs) -> Saved:
    q_SBHD, out, lse, dout, dlse = given
    if dout is None:
        dout = torch.zeros_like(out)
    if dlse is not None:
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    return Saved(q_SBHD, dout, out, lse, dlse)


def _slot_buffers(own: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    """Return a buffer for each slot. The buffer of slot 0 is ``own``, the rank's own rows."""
    buffers, (_, batch, all_heads, width) = [own], own.shape
    for slot in slots[1:]:
        heads = all_heads if slot.heads is None else slot.heads
        buffers.append(own.new_empty((slot.rows, batch, heads, width)))
    return buffers


def _heads_first(q: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Saved:
    """View (S, B, H, …) as (B, H, S, …), the order of dims that kernels take."""
    return Saved(
        q.movedim(0, 2), dout.movedim(0, 2), out.movedim(0, 2), lse.movedim(0, 2), None if dlse is None else dlse.movedim(0, 2)
    )
