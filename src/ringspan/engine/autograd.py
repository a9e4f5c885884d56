"""The autograd function around the engine: any number of ranks that this process drives, one transport.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ringspan.engine.beside import beside
from ringspan.engine.executor import Call, backward, forward
from ringspan.errors import InputError, KernelError, UnplannedAttention
from ringspan.kernels import Partial, Saved
from ringspan.planner import Plan

# Drives the walks of the ranks this process has, to their results: ``transport.run``.
Run = Callable[[Sequence[Any]], list[Any]]


def attend(plans: Sequence[Plan], qkv: Sequence[tuple[Tensor, Tensor, Tensor]], call: Call, run: Run) -> list[Partial]:
    """Attention of the ranks in this process. Tensors (B, heads, rows, dim); out and lse are differentiable in all three."""
    for plan, (q, k, _) in zip(plans, qkv, strict=True):
        heads, planned = (q.shape[1], k.shape[1]), plan.program.heads
        if planned not in (None, heads):
            raise InputError(
                f"this is a plan for {planned[0]} query heads and {planned[1]} key heads, but the tensors have {heads[0]} and "
                f"{heads[1]}: use plan.for_heads({heads[0]}, {heads[1]})"
            )
    size, sign = size_and_sign(call.scale)
    if sign != 1:
        qkv = [(q * sign, k, v) for q, k, v in qkv]
        call = replace(call, scale=size)
    # Rows become the first dim inside the function and the third again outside it, where a view may be changed in place.
    # What the functions of the call learn is an input as well.
    learned = () if call.mods is None else call.mods.learned
    flat = _Attend.apply(plans, call, run, *(tensor for rank in qkv for tensor in rank), *learned)
    return [Partial(out.movedim(0, 2), lse.movedim(0, 2)) for out, lse in zip(flat[::2], flat[1::2], strict=True)]


def size_and_sign(scale: float) -> tuple[float, float]:
    """A scale as a positive one, and what the queries are to be multiplied by.

    Kernels mask with -inf before or after scaling as they please; with the sign in the queries it makes no difference.
    """
    return (scale, 1.0) if scale > 0 else (-scale or 1.0, -1.0 if scale < 0 else 0.0)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plans: Sequence[Plan], call: Call, run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        qkv = inputs[: 3 * len(plans)]
        queries = [_rows_first(q) for q in qkv[::3]]
        key_values = [beside(_rows_first(k), _rows_first(v)) for k, v in zip(qkv[1::3], qkv[2::3], strict=True)]
        walks = [forward(plan, q, kv, call) for plan, q, kv in zip(plans, queries, key_values, strict=True)]
        outputs: list[Tensor] = []
        for result, q in zip(run(walks), queries, strict=True):
            # Detached, since they may be views of a larger buffer, and autograd lets nobody change those in place.
            outputs += [result.out.to(q.dtype).detach(), result.lse.detach()]
        ctx.set_materialize_grads(False)
        ctx.plans, ctx.call, ctx.run = plans, call, run
        # What was captured is kept where the functions keep it. It is saved for autograd's word that nobody has changed it.
        captured = () if call.mods is None else call.mods.captured
        ctx.save_for_backward(*queries, *key_values, *outputs, *captured)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        n = len(ctx.plans)
        tensors = saved_for_backward(ctx)
        queries, key_values, outputs = tensors[:n], tensors[n : 2 * n], tensors[2 * n : 4 * n]
        walks = []
        for rank, plan in enumerate(ctx.plans):
            out, lse = outputs[2 * rank : 2 * rank + 2]
            dout, dlse = grads[2 * rank : 2 * rank + 2]
            # On every rank all gradients are computed, needed or not: a rank that skipped its part would leave others waiting.
            saved = Saved(
                queries[rank],
                torch.zeros_like(out) if dout is None else dout,
                out,
                lse,
                None if dlse is None else dlse.masked_fill(lse == -torch.inf, 0.0),
            )
            walks.append(backward(plan, saved, key_values[rank], ctx.call))
        needed: list[Tensor] = []
        learned = () if ctx.call.mods is None else ctx.call.mods.learned
        totals: Sequence[Tensor] = [torch.zeros_like(x) for x in learned]
        with torch.no_grad():
            for (dq, dk, dv, *dlearned), q in zip(ctx.run(walks), queries, strict=True):
                needed += [x.movedim(0, 2).to(q.dtype) for x in (dq, dk, dv)]
                totals = [total + part.to(total.dtype) for total, part in zip(totals, dlearned, strict=True)]
        needed += totals
        return None, None, None, *(_once(x) if need else None for x, need in zip(needed, ctx.needs_input_grad[3:], strict=True))


def saved_for_backward(ctx: Any) -> tuple[Tensor, ...]:
    """What was saved, or computed again."""
    try:
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
        return tensors
    except CheckpointError as error:
        raise UnplannedAttention(
            "activation checkpointing computed this attention again, but not as it was: outside the `with cp:` block. "
            "Use checkpoint(..., use_reentrant=False, context_fn=cp.checkpoint_context)"
        ) from error


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated. PyTorch's ``once_differentiable`` would let it pass as a constant where the
    loss is linear in the result."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise KernelError("the gradient of attention was differentiated again: no kernel here computes second derivatives")


def _once(gradient: Tensor) -> Tensor:
    if not torch.is_grad_enabled():  # no create_graph=True: nobody can ask
        return gradient
    once: Tensor = _Once.apply(gradient.detach().requires_grad_())
    return once


def _rows_first(x_BHS: Tensor) -> Tensor:
    return x_BHS.movedim(2, 0)
