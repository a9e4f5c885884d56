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
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from ringspan.debugging.settings import settings
from ringspan.engine.finite import check_inputs_finite, check_results_finite
from ringspan.engine.global_indices import indexed_mods
from ringspan.engine.kept_rows import KeptRows, kept_rows, kept_tensors
from ringspan.engine.messages import StepMessages, schedule
from ringspan.engine.packing import SavedRows, pack_saved, pack_upstream, unpack_saved, unpack_upstream
from ringspan.engine.pass_cache import run_pass
from ringspan.engine.slots import Slots
from ringspan.kernels import GradientAccumulator, Kernel, Mods, OutputAccumulator, Saved, accumulation_dtype, max_logits
from ringspan.planner import Plan
from ringspan.plans import Program, Slot, Task
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


def forward(
    plan: Plan, q_SBHD: Tensor, kv_TBGF: Tensor, config: AttentionConfig, *, keep: bool = True
) -> RankGenerator[tuple[Tensor, ...]]:
    """Return the generator of a rank's forward pass.

    Its result is out (S, B, H, E) and lse (S, B, H). Out has the kernel's dtype if the accumulator still borrows a
    tensor of the kernel (:mod:`ringspan.kernels.accumulators`) or was completed by other ranks, else the accumulation
    dtype. With ``config.max_logits``
    the largest logit of each head (H,) is added to them. The last tensors are those that are kept for the backward pass
    (:mod:`ringspan.engine.kept_rows`), unless ``keep`` is False because there will be none.
    """
    keep = keep and plan.program.keeps_rows
    execute = partial(run_steps, plan, "forward", partial(_prepare_forward, plan, q_SBHD, kv_TBGF, config, keep))
    if config.max_logits:
        execute = partial(_largest_of_ranks, plan, execute)
    if config.mods is not None or not hasattr(config.kernel, "observed_launches"):
        return execute()
    options, inputs = (config.scale, config.head_dim, config.max_logits, keep), (q_SBHD, kv_TBGF)
    return run_pass(plan, "forward", config.kernel, options, inputs, execute, cuda_graphs=config.cuda_graphs)


def _largest_of_ranks(
    plan: Plan, execute: Callable[[], RankGenerator[tuple[Tensor, ...]]]
) -> RankGenerator[tuple[Tensor, ...]]:
    """Run a forward pass, and replace the largest logits of this rank's tasks by those of all ranks."""
    out, lse, largest_H, *kept = yield from execute()
    if plan.world > 1:
        counts = [len(largest_H)] * plan.world
        of_ranks = yield from all_gather_by_messages(largest_H, counts, plan.rank, "max logits")
        largest_H = torch.stack(of_ranks).amax(0)
    return out, lse, largest_H, *kept


def _prepare_forward(plan: Plan, q_SBHD: Tensor, kv_TBGF: Tensor, config: AttentionConfig, keep: bool) -> Pass:
    program, head_dim = plan.program, config.head_dim
    if settings.debug:
        check_inputs_finite(plan, "forward", {"q": q_SBHD, "k": kv_TBGF[..., :head_dim], "v": kv_TBGF[..., head_dim:]})
    # Rows that are not packed are sent from a contiguous copy. Otherwise the queries are read in place.
    if ("q", "forward") in program.sent_in_place or q_SBHD.stride(-1) != 1:
        q_SBHD = q_SBHD.contiguous()
    q_rows = _slot_buffers(q_SBHD, program.q_slots, q_SBHD.device) if ("q", "forward") in program.moving else [q_SBHD]
    kv_rows = _slot_buffers(kv_TBGF, program.kv_slots, kv_TBGF.device)
    value_dim = kv_TBGF.shape[-1] - head_dim
    like = torch.empty(0, dtype=accumulation_dtype(q_SBHD.dtype), device=q_SBHD.device)
    queries, keys = [], []
    outputs: list[OutputAccumulator] = []
    # Results that are sent complete are rounded in any case, so they may stay in a tensor of the kernel. Own results that
    # other ranks complete are written in the dtype of the tensors.
    for n, x_SBHD in enumerate(q_rows):
        queries.append(x_SBHD.movedim(0, 2))
        reuse = n == 0 or ("out", n) in program.sent_complete
        dtype = q_SBHD.dtype if n == 0 and "out" in program.own_results_complete else None
        shape = (*x_SBHD.shape[:3], value_dim)
        outputs.append(OutputAccumulator(shape, like=like, reuse_kernel_output=reuse, buffer_dtype=dtype))
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
            outputs[task.q_slot].add(start, stop, out.movedim(2, 0), lse.movedim(2, 0), adopt=True)
            del out, lse  # else they would be held while the next are computed

    slots = Slots({"q": q_rows, "kv": kv_rows}, outputs=outputs, dtype=q_SBHD.dtype)

    def finish() -> tuple[Tensor, ...]:
        kept = kept_tensors(program, q_rows, outputs, kv_rows) if keep else ()
        return *outputs[0].finish(), *largest, *kept

    return Pass(slots, compute, finish if largest or keep else outputs[0].finish)


class BackwardInputs(NamedTuple):
    """What the backward pass gets, rows first. A dout or dlse of None is zero.

    If the program does not read the own queries or keys, q and out, or kv, may be on the device "meta": their shapes
    and dtype are used, and they take no memory. ``kept`` are tensors that the forward pass returned.
    """

    q_SBHD: Tensor
    kv_TBGF: Tensor
    out_SBHE: Tensor
    lse_SBH: Tensor
    dout_SBHE: Tensor | None
    dlse_SBH: Tensor | None
    kept: tuple[Tensor, ...] = ()


def backward(plan: Plan, given: BackwardInputs, config: AttentionConfig) -> RankGenerator[tuple[Tensor, ...]]:
    """Return the generator of a rank's backward pass.

    Its result is dq (S, B, H, D), dk (T, B, G, D) and dv (T, B, G, E), with dtypes as in :func:`forward`, and this
    rank's contribution to the gradients of the captured tensors that require one (``Mods.learned``). All of them are
    computed on every rank, needed or not: a rank that skipped a gradient would leave its peers with unmatched receives.
    """
    execute = partial(run_steps, plan, "backward", partial(_prepare_backward, plan, given, config))
    if config.mods is not None or not hasattr(config.kernel, "observed_launches"):
        return execute()
    # Inputs on the device "meta" are not tensors of the pass, but their shapes and dtype are read.
    options = config.scale, config.head_dim, given.q_SBHD.dtype, given.q_SBHD.shape, given.kv_TBGF.shape
    inputs = [None if x is None or x.is_meta else x for x in (*given[:-1], *given.kept)]
    return run_pass(plan, "backward", config.kernel, options, inputs, execute, cuda_graphs=config.cuda_graphs)


def _prepare_backward(plan: Plan, given: BackwardInputs, config: AttentionConfig) -> Pass:
    program, mods, head_dim = plan.program, config.mods, config.head_dim
    # A hook of saved tensors may return other strides than those of the tensor that was saved.
    kv_TBGF, kept_contiguous = given.kv_TBGF.contiguous(), [x.contiguous() for x in given.kept]
    kept = kept_rows(program, kept_contiguous) if kept_contiguous else KeptRows({}, {})
    value_dim = kv_TBGF.shape[-1] - head_dim
    own = _own_queries(given)
    del given
    if settings.debug:
        check_inputs_finite(plan, "backward", {"dout": own.dout_SBHE, "dlse": own.dlse_SBH})
    device = own.lse_SBH.device
    rows, of_slots = _query_slots(program, own, kept, head_dim)
    rows["kv"] = _slot_buffers(kv_TBGF, program.kv_slots, device, kept.keys)
    like = torch.empty(0, dtype=accumulation_dtype(kv_TBGF.dtype), device=device)
    queries: list[Saved] = []
    dq: list[GradientAccumulator] = []
    for n, saved in enumerate(of_slots):
        reuse = n == 0 or ("dq", n) in program.sent_complete
        dtype = kv_TBGF.dtype if n == 0 and "dq" in program.own_results_complete else None
        shape = saved.lse_SBH.shape
        dq.append(GradientAccumulator(shape, (head_dim,), like=like, reuse_kernel_output=reuse, buffer_dtype=dtype))
        queries.append(_heads_first(*saved))
    keys: list[tuple[Tensor, Tensor]] = []
    dkv: list[GradientAccumulator] = []
    for n, x_TBGF in enumerate(rows["kv"]):
        kv_BGTF = x_TBGF.movedim(0, 2)
        keys.append((kv_BGTF[..., :head_dim], kv_BGTF[..., head_dim:]))
        reuse = n == 0 or ("dkv", n) in program.sent_complete
        dtype = kv_TBGF.dtype if n == 0 and "dkv" in program.own_results_complete else None
        shape, widths = x_TBGF.shape[:3], (head_dim, value_dim)
        dkv.append(GradientAccumulator(shape, widths, like=like, reuse_kernel_output=reuse, buffer_dtype=dtype))
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
            dq[task.q_slot].add(grads.rows.start, grads.rows.stop, dq_SBHD, adopt=True)
            dkv[task.kv_slot].add(grads.keys.start, grads.keys.stop, dk_TBGD, dv_TBGE, adopt=True)
            for total, grad in zip(dlearned, grads.dlearned, strict=True):
                total.add_(grad)
            del grads, dq_SBHD, dk_TBGD, dv_TBGE  # else they would be held while the next are computed

    def finish() -> tuple[Tensor, ...]:
        return *dq[0].finish(), *dkv[0].finish(), *dlearned

    dkv_dtype = DKV_MESSAGE_DTYPES[program.dkv_dtype]
    slots = Slots(rows, gradients={"dq": dq, "dkv": dkv}, dtype=kv_TBGF.dtype, dkv_dtype=dkv_dtype)
    return Pass(slots, compute, finish)


def _query_slots(
    program: Program, own: SavedRows, kept: KeptRows, head_dim: int
) -> tuple[dict[str, list[Tensor]], list[SavedRows]]:
    """Return the buffers of the query slots of the backward pass, and what each slot holds.

    Queries that move are sent with all that their gradient needs, in one row. Those that stay need no such copy, and of
    those that are kept only dout and dlse are sent.
    """
    rows: dict[str, list[Tensor]] = {"q": [], "dout": []}
    slots, device = program.q_slots, own.lse_SBH.device
    if ("q", "backward") in program.moving:
        rows["q"] = _slot_buffers(pack_saved(own), slots, device, {n: x.q_SBHD for n, x in kept.queries.items()})
    if ("dout", "backward") in program.moving or kept.queries:
        packed = pack_upstream(own.dout_SBHE, own.dlse_SBH)
        rows["dout"] = _slot_buffers(packed, slots, device, {n: packed[:0] for n, slot in enumerate(slots) if not slot.kept})
    queries = [own]
    for n, slot in enumerate(program.q_slots[1:], start=1):
        if n in kept.queries:
            q, out, lse = kept.queries[n]
            dout, dlse = unpack_upstream(rows["dout"][n], out.shape[-1])
            queries.append(SavedRows(q, dout, out, lse, dlse))
        elif rows["q"] and not slot.kept:
            queries.append(unpack_saved(rows["q"][n], head_dim, own.out_SBHE.shape[-1]))
        else:  # no task uses it
            queries.append(SavedRows(*(None if x is None else x[:0] for x in own)))  # type: ignore[arg-type]
    return rows, queries


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


def _own_queries(given: BackwardInputs) -> SavedRows:
    """Return the rank's own queries, with what their gradients need."""
    q, out, lse, dout, dlse = given.q_SBHD, given.out_SBHE, given.lse_SBH, given.dout_SBHE, given.dlse_SBH
    if dout is None:
        dout = torch.zeros(out.shape, dtype=out.dtype, device=lse.device)
    if dlse is not None:
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    q, dout, out = [x if x.is_meta or x.stride(-1) == 1 else x.contiguous() for x in (q, dout, out)]
    return SavedRows(q, dout, out, lse, dlse)


def _slot_buffers(
    own: Tensor, slots: Sequence[Slot], device: torch.device, given: Mapping[int, Tensor] = MappingProxyType({})
) -> list[Tensor]:
    """Return a buffer for each slot. That of slot 0 is ``own``, the rank's own rows, and some others are given."""
    buffers, (_, batch, all_heads, width) = [own], own.shape
    for n, slot in enumerate(slots[1:], start=1):
        heads = all_heads if slot.heads is None else slot.heads
        buffers.append(given[n] if n in given else own.new_empty((slot.rows, batch, heads, width), device=device))
    return buffers


def _heads_first(q: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Saved:
    """View (S, B, H, …) as (B, H, S, …), the order of dims that kernels take."""
    return Saved(
        q.movedim(0, 2), dout.movedim(0, 2), out.movedim(0, 2), lse.movedim(0, 2), None if dlse is None else dlse.movedim(0, 2)
    )
