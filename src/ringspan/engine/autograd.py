"""Attention as an autograd function, for any number of ranks in this process.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim, F = D + E.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ringspan.engine.executor import AttentionConfig, BackwardInputs, Run, backward, forward
from ringspan.engine.kept_rows import count_kept
from ringspan.engine.kernel_choice import with_max_logits
from ringspan.engine.packing import pack_kv
from ringspan.errors import InputError, KernelError, UnplannedAttention
from ringspan.kernels import Partial
from ringspan.planner import Plan

QKV = tuple[Tensor, Tensor, Tensor]


def attend_ranks(plans: Sequence[Plan], qkv: Sequence[QKV], config: AttentionConfig, run: Run) -> list[Partial]:
    """Return out and lse of each rank in this process.

    Tensors are (B, heads, rows, dim). Out and lse are differentiable in q, k and v.
    """
    flat = _attend_ranks(plans, qkv, config, run)
    results = []
    for i in range(0, len(flat), 2):
        results.append(heads_first(flat[i], flat[i + 1]))
    return results


def attend_ranks_with_max_logits(
    plans: Sequence[Plan], qkv: Sequence[QKV], config: AttentionConfig, run: Run
) -> tuple[list[Partial], Tensor]:
    """Return out and lse of each rank in this process, and the largest logit of each head (H,), not differentiable."""
    flat = _attend_ranks(plans, qkv, with_max_logits(config), run)
    results = []
    for i in range(0, len(flat), 3):
        results.append(heads_first(flat[i], flat[i + 1]))
    return results, flat[2]  # it is the same for all ranks


def heads_first(out_SBHE: Tensor, lse_SBH: Tensor) -> Partial:
    """Return views (B, H, S, E) and (B, H, S) of a result."""
    return Partial(out_SBHE.movedim(0, 2), lse_SBH.movedim(0, 2))


def _attend_ranks(plans: Sequence[Plan], qkv: Sequence[QKV], config: AttentionConfig, run: Run) -> tuple[Tensor, ...]:
    for plan, (q, k, _) in zip(plans, qkv, strict=True):
        heads, planned = (q.shape[1], k.shape[1]), plan.program.heads
        if planned not in (None, heads):
            raise InputError(
                f"this is a plan for {planned[0]} query heads and {planned[1]} key heads, but the tensors have {heads[0]} and "
                f"{heads[1]}: use plan.for_heads({heads[0]}, {heads[1]})"
            )
    if config.scale <= 0:
        scale, sign = positive_scale(config.scale)
        qkv, config = [(q * sign, k, v) for q, k, v in qkv], replace(config, scale=scale)
    tensors: list[Tensor] = []
    for rank in qkv:
        tensors += rank
    # The tensors that the user's functions learn are inputs as well. Rows become the first dim inside the function and
    # the third again outside it: a view made outside may be changed in place.
    try:
        flat: tuple[Tensor, ...] = Attend.apply(
            plans, config, run, torch.is_grad_enabled(), *tensors, *(() if config.mods is None else config.mods.learned)
        )
    except RuntimeError as error:
        refuse_transforms(error)
        raise
    return flat


def refuse_transforms(error: Exception) -> None:
    """Raise an error that names torch.vmap and the like, if one of them is the cause of this error."""
    if "functorch transforms" in str(error):
        raise InputError(
            "attention over several ranks cannot run inside torch.vmap, torch.func.grad and other transforms of torch.func: "
            "call it with a batch dim, and differentiate with backward() or torch.autograd.grad"
        ) from error


def positive_scale(scale: float) -> tuple[float, float]:
    """Return a positive scale, and the factor by which the queries must be multiplied to make up for it.

    Kernels mask with -inf before or after they scale. With the sign in the queries the order makes no difference.
    """
    return (scale, 1.0) if scale > 0 else (-scale or 1.0, -1.0 if scale < 0 else 0.0)


class Attend(torch.autograd.Function):
    """Attention of the ranks in this process: of each rank out (S, B, H, E) and lse (S, B, H).

    Inputs are q, k and v of each rank, (B, heads, rows, dim), and the tensors that the user's functions learn. With
    ``config.max_logits`` out and lse of each rank are followed by the largest logit of each head, (H,).
    """

    @staticmethod
    def forward(
        ctx: Any, plans: Sequence[Plan], config: AttentionConfig, run: Run, grad_enabled: bool, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        keep = grad_enabled and any(ctx.needs_input_grad)  # needs_input_grad does not depend on no_grad()
        queries, key_values, generators = [], [], []
        for i, plan in enumerate(plans):
            q_BHSD, k_BGTD, v_BGTE = inputs[3 * i : 3 * i + 3]
            q_SBHD, kv_TBGF = q_BHSD.movedim(2, 0), pack_kv(k_BGTD.movedim(2, 0), v_BGTE.movedim(2, 0))
            queries.append(q_SBHD)
            key_values.append(kv_TBGF)
            generators.append(forward(plan, q_SBHD, kv_TBGF, config, keep=keep))
        outputs: list[Tensor] = []
        results: list[Tensor] = []
        kept: list[Tensor] = []
        for out, lse, *more in run(generators, config.forward_call):
            # Detached: they may be views of a larger buffer, and autograd forbids in-place changes of those.
            outputs += [out.to(inputs[0].dtype).detach(), lse.detach()]
            results += outputs[-2:]
            if config.max_logits:
                results.append(more.pop(0))
            kept += more
        if config.max_logits:
            ctx.mark_non_differentiable(*results[2::3])
        ctx.set_materialize_grads(False)
        ctx.plans, ctx.config, ctx.run = plans, config, run
        # The functions hold the tensors that they have captured. Saving these makes autograd check that they are not
        # changed.
        captured = () if config.mods is None else config.mods.captured
        own: list[Tensor | None] = []
        ctx.unread = {}  # the shapes of own rows that the backward pass does not read, by their place in `own`
        for of, of_ranks in (("q", queries), ("kv", key_values), ("q", outputs[::2])):
            for plan, x in zip(plans, of_ranks, strict=True):
                is_read = of in plan.program.own_rows_read
                if not is_read:
                    ctx.unread[len(own)] = torch.empty_like(x, device="meta")
                own.append(x if is_read else None)
        ctx.save_for_backward(*own, *outputs[1::2], *kept, *captured)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        n = len(ctx.plans)
        if ctx.config.max_logits:
            grads = tuple(grad for i, grad in enumerate(grads) if i % 3 < 2)
        tensors = saved_tensors(ctx)
        own = [ctx.unread.get(i, x) for i, x in enumerate(tensors[: 3 * n])]
        lses, kept = tensors[3 * n : 4 * n], iter(tensors[4 * n :])
        mods = ctx.config.mods
        dlearned = [] if mods is None else [torch.zeros_like(x) for x in mods.learned]
        computed: list[Tensor] = []
        with torch.no_grad():
            generators = []
            for i, plan in enumerate(ctx.plans):
                of_rank = tuple(islice(kept, count_kept(plan.program))) if plan.program.keeps_rows else ()
                (q, kv, out), (dout, dlse) = own[i::n], grads[2 * i : 2 * i + 2]
                given = BackwardInputs(q, kv, out, lses[i], dout, dlse, of_rank)
                generators.append(backward(plan, given, ctx.config))
            for dq, dk, dv, *dlearned_of_rank in ctx.run(generators, ctx.config.backward_call):
                for grad in (dq, dk, dv):
                    computed.append(grad.movedim(0, 2).to(own[0].dtype))
                for i, grad in enumerate(dlearned_of_rank):
                    dlearned[i] = dlearned[i] + grad.to(dlearned[i].dtype)
        computed += dlearned
        again = torch.is_grad_enabled()  # create_graph=True: the gradient may be differentiated
        # Of the results, which depend on all inputs. The lse of each rank is saved in any case.
        origins = (*tensors[2 * n : 4 * n], *grads)
        found: list[Tensor | None] = []
        for x, needed in zip(computed, ctx.needs_input_grad[4:], strict=True):
            found.append((once_differentiable(x, *origins) if again else x) if needed else None)
        return None, None, None, None, *found


def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """Return the tensors that the forward pass saved. Activation checkpointing computes them again here."""
    try:
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
        return tensors
    except CheckpointError as error:
        raise UnplannedAttention(
            "activation checkpointing computed this attention again, but not as it was. If its block was not entered again, "
            "open the block inside the checkpointed function"
        ) from error


SECOND_DERIVATIVE = "the gradient of attention was differentiated again: no kernel here computes second derivatives"


def once_differentiable(gradient: Tensor, *origins: Tensor | None) -> Tensor:
    """Return a gradient that raises when it is differentiated.

    ``origins`` are tensors that it was computed from. ``torch.autograd.grad(..., inputs)`` runs only what lies on a
    path to its inputs, so the result must be connected with them. PyTorch's decorator of that name would treat the
    gradient as a constant where the loss is linear in the result.
    """
    marked: Tensor = _OnceDifferentiable.apply(gradient.detach().requires_grad_(), *origins)
    return marked


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *origins: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise KernelError(SECOND_DERIVATIVE)
