"""Attention as the custom operators ``ringspan::attend`` and ``ringspan::attend_backward``.

``torch.compile``, ``torch.export``, selective checkpointing and dispatch modes work on operators. Both run the same
passes as eager code (:mod:`ringspan.engine.executor`) on the plan registered under their ``plan_id``
(:mod:`ringspan.engine.handles`), with one difference: no rows are kept for the backward pass (``Slot.kept``). The
shapes of an operator's results follow from those of its arguments, and how many rows a rank keeps depends on the plan,
which is an argument, too. So these rows are exchanged again.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringspan.engine.autograd import SECOND_DERIVATIVE, heads_first, positive_scale, saved_tensors
from ringspan.engine.executor import AttentionConfig, BackwardInputs, backward, forward
from ringspan.engine.handles import registry
from ringspan.engine.kernel_choice import with_max_logits
from ringspan.engine.packing import pack_kv
from ringspan.errors import KernelError
from ringspan.kernels import Partial, accumulation_dtype
from ringspan.torch_private.dispatch_keys import default_dispatch_keys
from ringspan.torch_private.dynamo import dynamo_constant, dynamo_disable
from ringspan.torch_private.function_modes import disable_torch_function


@dynamo_constant
def is_exporting() -> bool:
    # Evaluated outside of the trace. Inside it, torch 2.11 returns True for every compiler, and a compiled program
    # would keep its first id.
    return torch.compiler.is_exporting()


def attend_by_id(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, plan_id: Tensor, scale: float) -> Partial:
    """Compute attention by the custom operator, under the plan that is registered under this id."""
    q_BHSD, scale = _with_positive_scale(q_BHSD, scale)
    call = _call_outside_graph if _would_be_removed(q_BHSD) else _call
    return heads_first(*call(torch.ops.ringspan.attend, q_BHSD, k_BGTD, v_BGTE, plan_id, scale))


def attend_by_id_with_max_logits(
    q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, plan_id: Tensor, scale: float
) -> tuple[Partial, Tensor]:
    """Compute attention as :func:`attend_by_id` does, and the largest logit of each head (H,)."""
    q_BHSD, scale = _with_positive_scale(q_BHSD, scale)
    call = _call_outside_graph if _would_be_removed(q_BHSD) else _call
    out, lse, largest_H = call(torch.ops.ringspan.attend_with_max_logits, q_BHSD, k_BGTD, v_BGTE, plan_id, scale)
    return heads_first(out, lse), largest_H


def _would_be_removed(q_BHSD: Tensor) -> bool:
    """Return whether a compiler would remove the operator of this rank, whose messages other ranks wait for.

    Inductor replaces tensors without elements by constants. A rank without queries has no other results.
    """
    return q_BHSD.shape[2] == 0 and torch.compiler.is_dynamo_compiling() and not is_exporting()


def _call(operator: Any, *args: Any) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = operator(*args)
    return result


_call_outside_graph = dynamo_disable(_call)


def _with_positive_scale(q_BHSD: Tensor, scale: float) -> tuple[Tensor, float]:
    scale, sign = positive_scale(scale)
    return q_BHSD if sign == 1 else q_BHSD * sign, scale


# Results are rows first and contiguous: a compiled program relies on the strides that the fake implementations promise,
# whatever the kernel returns.
#
# cudagraph_unsafe: torch.compile warms up its own CUDA graphs in memory of the graph, where tensors that are cached for
# a plan must not lie.

TAGS = (torch.Tag.cudagraph_unsafe,)
torch.library.define(
    "ringspan::attend", "(Tensor q, Tensor k, Tensor v, Tensor plan_id, float scale) -> (Tensor, Tensor)", tags=TAGS
)
torch.library.define(
    "ringspan::attend_with_max_logits",
    "(Tensor q, Tensor k, Tensor v, Tensor plan_id, float scale) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)
torch.library.define(
    "ringspan::attend_backward",
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor plan_id, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


_callbacks: list[Callable[[], None]] = []


def before_operator(callback: Callable[[], None]) -> None:
    """Call a function before each forward pass of the operator."""
    _callbacks.append(callback)


@torch.library.impl("ringspan::attend", "CompositeExplicitAutograd")
def _attend(q: Tensor, k: Tensor, v: Tensor, plan_id: Tensor, scale: float) -> tuple[Tensor, ...]:
    return _run_forward(q, k, v, plan_id, scale, max_logits=False)


@torch.library.impl("ringspan::attend_with_max_logits", "CompositeExplicitAutograd")
def _attend_with_max_logits(q: Tensor, k: Tensor, v: Tensor, plan_id: Tensor, scale: float) -> tuple[Tensor, ...]:
    return _run_forward(q, k, v, plan_id, scale, max_logits=True)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, plan_id: Tensor, scale: float, *, max_logits: bool) -> tuple[Tensor, ...]:
    for callback in _callbacks:
        callback()
    handle = registry.find(plan_id)
    with handle.reporting("forward", scale), disable_torch_function(), torch.no_grad():
        plan, config = handle.prepare(q, k, v, scale, keep=False)
        if max_logits:
            config = with_max_logits(config)
        q_SBHD, k_TBGD, v_TBGE = q.movedim(2, 0), k.movedim(2, 0), v.movedim(2, 0)
        with _outside_operators(config):
            ((out, lse, *largest),) = handle.group.run(
                [forward(plan, q_SBHD, pack_kv(k_TBGD, v_TBGE), config)], config.forward_call, device=q.device
            )
        return out.to(q.dtype).contiguous(), lse.contiguous(), *largest


@torch.library.impl("ringspan::attend_backward", "CompositeExplicitAutograd")
def _attend_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan_id: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    handle = registry.find(plan_id)
    with handle.reporting("backward", scale), disable_torch_function(), torch.no_grad():
        plan, config = handle.prepare(q, k, v, scale, keep=False)
        q_SBHD, k_TBGD, v_TBGE = q.movedim(2, 0), k.movedim(2, 0), v.movedim(2, 0)
        given = BackwardInputs(q_SBHD, pack_kv(k_TBGD, v_TBGE), out, lse, dout, dlse)
        with _outside_operators(config):
            ((dq, dk, dv, *_),) = handle.group.run([backward(plan, given, config)], config.backward_call, device=q.device)
        return tuple([x.movedim(0, 2).to(q.dtype).contiguous() for x in (dq, dk, dv)])


@contextmanager
def _outside_operators(config: AttentionConfig) -> Iterator[None]:
    """Enable ``torch.vmap`` and autograd for functions of the user. The dispatcher disables both inside an operator."""
    if config.mods is None:
        yield
        return
    with default_dispatch_keys(), torch.inference_mode(torch.is_inference_mode_enabled()):
        yield


@torch.library.register_fake("ringspan::attend")
def fake_results(q: Tensor, k: Tensor, v: Tensor, plan_id: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes, dtypes and strides of out and lse."""
    b, h, s, _ = q.shape
    return q.new_empty((s, b, h, v.shape[-1])), q.new_empty((s, b, h), dtype=accumulation_dtype(q.dtype))


@torch.library.register_fake("ringspan::attend_with_max_logits")
def _fake_results_with_max_logits(q: Tensor, k: Tensor, v: Tensor, plan_id: Tensor, scale: float) -> tuple[Tensor, ...]:
    out, lse = fake_results(q, k, v, plan_id, scale)
    return out, lse, lse.new_empty(q.shape[1:2])


@torch.library.register_fake("ringspan::attend_backward")
def fake_gradients(dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return tensors of the shapes, dtypes and strides of dq, dk and dv."""
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save all inputs and outputs. The last input is the scale, which is not a tensor."""
    *tensors, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _save_without_max_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse, largest_H = output
    ctx.mark_non_differentiable(largest_H)
    save_for_backward(ctx, inputs, (out, lse))


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, dlargest: None = None) -> tuple[Any, ...]:
    q, k, v, plan_id, out, lse = saved_tensors(ctx)
    grads = torch.ops.ringspan.attend_backward(dout, dlse, q, k, v, out, lse, plan_id, ctx.scale)
    return *grads, None, None


def refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    """Raise, as the backward pass of a backward pass."""
    raise KernelError(SECOND_DERIVATIVE)


torch.library.register_autograd("ringspan::attend", _differentiate, setup_context=save_for_backward)
torch.library.register_autograd("ringspan::attend_with_max_logits", _differentiate, setup_context=_save_without_max_logits)
torch.library.register_autograd("ringspan::attend_backward", refuse_second_derivative)
