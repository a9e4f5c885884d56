"""The engine: a generator forward, one backward. They walk a plan, yield the exchanges they need, and move no byte themselves.

Legend: rows first everywhere. S queries, T keys, B batch, H query heads, G key heads, D head dim, E value dim; keys and
values lie side by side, D + E wide, so that a token is one contiguous row and travels without packing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ringspan.engine.bundle import bundle, unbundle
from ringspan.engine.global_indices import placed
from ringspan.engine.messages import routes
from ringspan.engine.slots import Slots
from ringspan.kernels import GradientAccumulator, Kernel, Mods, OutputAccumulator, Partial, Saved, accumulation_dtype
from ringspan.planner import Plan
from ringspan.plans import Slot, Task
from ringspan.plans.data import Phase
from ringspan.torch_private.profiler import profiler_enabled
from ringspan.transports import RankCoroutine, WaitExchange

NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """What is the same for all ranks and all steps of one call of attention."""

    kernel: Kernel
    scale: float
    head_dim: int
    mods: Mods | None = None


def forward(plan: Plan, q_SBHD: Tensor, kv_TBGF: Tensor, config: AttentionConfig) -> RankCoroutine[Partial]:
    """Run the forward steps.

    Returns this rank's result: out (S, B, H, E), wide or as the kernel wrote it, and lse (S, B, H).
    """
    program = plan.program
    q_SBHD = _together(q_SBHD)
    kv = [kv_TBGF, *(_room(slot, kv_TBGF) for slot in program.kv_slots[1:])]
    # Queries that travel do so from a copy that lies row by row; those that stay are read as they lie.
    moving = program.moves_queries("forward")
    q = [q_SBHD.contiguous(), *(_room(slot, q_SBHD) for slot in program.q_slots[1:])] if moving else [q_SBHD]
    value_dim = kv_TBGF.shape[-1] - config.head_dim
    like = torch.empty(0, dtype=accumulation_dtype(q_SBHD.dtype), device=q_SBHD.device)
    out = [OutputAccumulator((*x.shape[:3], value_dim), like=like, keeps=x is q[0]) for x in q]
    queries, keys = [_heads_first(x) for x in q], [_key_value(x, config) for x in kv]

    def compute(task: Task, n: int) -> None:
        options = _options(config, plan, "forward", n, task, q_SBHD.device)
        for part in config.kernel.attend(queries[task.q_slot], *keys[task.kv_slot], task.bands, **options):
            out[task.q_slot].add(*part)
            del part  # else it would be held while the next is computed

    yield from _walk(plan, "forward", Slots(plain={"q": q, "kv": kv}, results=out), compute)
    return out[0].finish()


def backward(plan: Plan, saved: Saved, kv_TBGF: Tensor, config: AttentionConfig) -> RankCoroutine[tuple[Tensor, ...]]:
    """Run the backward steps. ``saved`` is rows first.

    Returns the gradients dq (S, B, H, D), dk (T, B, G, D) and dv (T, B, G, E), wide or as the kernel wrote them; and this
    rank's part of the gradients of what the functions of the call learn.
    """
    program = plan.program
    q_SBHD, dout_SBHE, out_SBHE = map(_together, saved[:3])
    saved = saved._replace(q_BHSD=q_SBHD, dout_BHSE=dout_SBHE, out_BHSE=out_SBHE)
    kv = [kv_TBGF, *(_room(slot, kv_TBGF) for slot in program.kv_slots[1:])]
    # Queries that travel take along all that their gradient needs, in one row; those that stay need no such copy.
    q: list[Tensor] = []
    if program.moves_queries("backward"):
        own = bundle(saved)
        q = [own, *(_room(slot, own) for slot in program.q_slots[1:])]
    value_dim = kv_TBGF.shape[-1] - config.head_dim
    visitors = (unbundle(x, config.head_dim, value_dim) for x in q[1:])
    queries = [Saved(*(None if x is None else _heads_first(x) for x in rows)) for rows in (saved, *visitors)]  # type: ignore[arg-type]
    like = torch.empty(0, dtype=accumulation_dtype(kv_TBGF.dtype), device=kv_TBGF.device)
    dkv = [GradientAccumulator(x.shape[:3], (config.head_dim, value_dim), like=like, keeps=x is kv_TBGF) for x in kv]
    dq = [
        GradientAccumulator(x.shape[:3], (config.head_dim,), like=like, keeps=x is saved.q_BHSD) for x in (saved.q_BHSD, *q[1:])
    ]

    keys = [_key_value(x, config) for x in kv]
    learned = () if config.mods is None else config.mods.learned
    dlearned = [torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in learned]

    def compute(task: Task, n: int) -> None:
        options = _options(config, plan, "backward", n, task, kv_TBGF.device)
        for grads in config.kernel.attend_backward(queries[task.q_slot], *keys[task.kv_slot], task.bands, **options):
            dq[task.q_slot].add(grads.rows.start, grads.rows.stop, _rows_first(grads.dq_BHSD))
            dkv[task.kv_slot].add(grads.keys.start, grads.keys.stop, _rows_first(grads.dk_BGTD), _rows_first(grads.dv_BGTE))
            for total, part in zip(dlearned, grads.dlearned, strict=True):
                total.add_(part)
            del grads  # else they would be held while the next are computed

    yield from _walk(plan, "backward", Slots(plain={"q": q, "kv": kv}, sums={"dq": dq, "dkv": dkv}), compute)
    return *dq[0].finish(), *dkv[0].finish(), *dlearned


def _walk(plan: Plan, phase: Phase, slots: Slots, compute: Callable[[Task, int], None]) -> RankCoroutine[None]:
    """Each step: post what travels, compute while it does, wait, and lay out what has arrived."""
    for n, (step, route) in enumerate(zip(plan.program.steps(phase), plan.derived(routes, phase), strict=True)):
        label = f"{phase} step {n}"
        post, arrivals = slots.post(route, label)
        on_the_wire = bool(post.sends or post.recvs)
        ticket = (yield post) if on_the_wire else None
        with _span(plan, phase, n):
            for task in step.tasks:
                compute(task, n)
        if on_the_wire:
            yield WaitExchange(ticket)
        slots.take(arrivals)
        # Else the next step's messages would be packed while this step's are still held.
        del post, arrivals, ticket


def _options(config: AttentionConfig, plan: Plan, phase: Phase, n: int, task: Task, device: torch.device) -> dict[str, Any]:
    """What a kernel is told beside tensors and bands. Only those that know functions of the user are given any."""
    if config.mods is None:
        return {"scale": config.scale}
    return {"scale": config.scale, "mods": placed(config.mods, plan, phase, n, task, device)}


def _span(plan: Plan, phase: Phase, n: int) -> AbstractContextManager[Any]:
    """A named span in a profiler's trace. Where nobody is looking it is nothing: opening one takes as long as a launch."""
    if not profiler_enabled():
        return NOTHING
    return record_function(f"ringspan::step {n} {phase}, rank {plan.rank}")


def _room(slot: Slot, like: Tensor) -> Tensor:
    heads = like.shape[2] if slot.heads is None else slot.heads
    return like.new_empty((slot.rows, like.shape[1], heads, like.shape[3]))


def _together(x_SBHD: Tensor) -> Tensor:
    """With the numbers of a row side by side, as kernels take it for granted."""
    return x_SBHD if x_SBHD.stride(-1) == 1 else x_SBHD.contiguous()


def _heads_first(x_SBH: Tensor) -> Tensor:
    """(S, B, H, …) seen as (B, H, S, …), the way kernels see it."""
    return x_SBH.movedim(0, 2)


def _rows_first(x_BHS: Tensor) -> Tensor:
    return x_BHS.movedim(2, 0)


def _key_value(kv_TBGF: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    kv_BGTF = _heads_first(kv_TBGF)
    return kv_BGTF[..., : config.head_dim], kv_BGTF[..., config.head_dim :]
