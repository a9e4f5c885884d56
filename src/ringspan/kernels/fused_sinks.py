"""Triton kernels that add attention sinks to a result, forward and backward. Each reads and writes every element once.

A sink is one more key of a head, with a score of its own and a value of zero. With ``share = sigmoid(lse - sink)``::

    out' = share * out                 dout  = share * dout'
    lse' = log(exp(lse) + exp(sink))   dlse  = share * dlse' + (1 - share) * delta
                                       dsink = sum over rows of (1 - share) * (dlse' - delta)

where ``delta`` is the sum of ``dout' * out'`` over a row. So the backward pass needs out' and not out.

Legend: S queries, B batch, H query heads, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.fused import BLOCK, launch_rows
from ringspan.kernels.partial import share_of_keys


@triton.jit
def _share(lse, sink):  # type: ignore[no-untyped-def]
    # For a row without keys and a sink of -inf the difference is NaN; out is 0 then.
    return tl.where(lse == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp(sink - lse)))


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    new_out, new_lse, out, lse, sink, count, batch, heads,
    new_s, new_b, new_h, new_lse_s, new_lse_b, new_lse_h, out_s, out_b, out_h, lse_s, lse_b, lse_h, sink_h,
    E: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < count
    h = (row % heads).to(tl.int64)
    b = ((row // heads) % batch).to(tl.int64)
    s = (row // (heads * batch)).to(tl.int64)
    a = tl.load(lse + s * lse_s + b * lse_b + h * lse_h, mask=here, other=0.0)
    c = tl.load(sink + h * sink_h, mask=here, other=0.0)
    top = tl.maximum(a, c)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = safe + tl.log(tl.exp(a - safe) + tl.exp(c - safe))
    tl.store(new_lse + s * new_lse_s + b * new_lse_b + h * new_lse_h, total, mask=here)
    e = tl.arange(0, WIDTH)
    inside = here[:, None] & (e < E)[None, :]
    old = tl.load(out + (s * out_s + b * out_b + h * out_h)[:, None] + e[None, :], mask=inside, other=0.0).to(tl.float32)
    scaled = old * _share(a, c)[:, None]
    tl.store(
        new_out + (s * new_s + b * new_b + h * new_h)[:, None] + e[None, :], scaled.to(new_out.dtype.element_ty), mask=inside
    )


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dout, dlse, dsink, new_dout, new_dlse, new_out, lse, sink, count, batch, heads,
    dout_s, dout_b, dout_h, dlse_s, dlse_b, dlse_h, dsink_s, dsink_b, dsink_h,
    new_dout_s, new_dout_b, new_dout_h, new_dlse_s, new_dlse_b, new_dlse_h, new_s, new_b, new_h,
    lse_s, lse_b, lse_h, sink_h,
    E: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < count
    h = (row % heads).to(tl.int64)
    b = ((row // heads) % batch).to(tl.int64)
    s = (row // (heads * batch)).to(tl.int64)
    e = tl.arange(0, WIDTH)[None, :]
    inside = here[:, None] & (e < E)
    grad_at = new_dout + (s * new_dout_s + b * new_dout_b + h * new_dout_h)[:, None] + e
    grad = tl.load(grad_at, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(new_out + (s * new_s + b * new_b + h * new_h)[:, None] + e, mask=inside, other=0.0).to(tl.float32)
    lse_grad = tl.load(new_dlse + s * new_dlse_s + b * new_dlse_b + h * new_dlse_h, mask=here, other=0.0)
    a = tl.load(lse + s * lse_s + b * lse_b + h * lse_h, mask=here, other=0.0)
    share = _share(a, tl.load(sink + h * sink_h, mask=here, other=0.0))
    delta = tl.sum(grad * out, 1)
    dout_at = dout + (s * dout_s + b * dout_b + h * dout_h)[:, None] + e
    tl.store(dout_at, (grad * share[:, None]).to(dout.dtype.element_ty), mask=inside)
    tl.store(dlse + s * dlse_s + b * dlse_b + h * dlse_h, share * lse_grad + (1.0 - share) * delta, mask=here)
    tl.store(dsink + s * dsink_s + b * dsink_b + h * dsink_h, (1.0 - share) * (lse_grad - delta), mask=here)


class AddSinks(torch.autograd.Function):
    """Add sinks (H,) to out (S, B, H, E) and lse (S, B, H); lse and sinks in float32."""

    @staticmethod
    def forward(ctx: Any, out_SBHE: Tensor, lse_SBH: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
        out_SBHE = out_SBHE if out_SBHE.stride(-1) == 1 else out_SBHE.contiguous()
        new_out, new_lse = torch.empty_like(out_SBHE), torch.empty_like(lse_SBH)
        launch_rows(_forward, (new_out, new_lse, out_SBHE, lse_SBH, sink_H), lse_SBH.shape, _sizes(out_SBHE))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(new_out, lse_SBH, sink_H)
        return new_out, new_lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        new_out, lse, sink_H = ctx.saved_tensors
        dout = torch.zeros_like(new_out) if dout is None else dout
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        if torch.is_grad_enabled():  # create_graph=True: the gradients may be differentiated
            return _gradients(dout, dlse, new_out, lse, sink_H)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        found = torch.empty_like(new_out), torch.empty_like(lse), torch.empty_like(lse)
        launch_rows(_backward, (*found, dout, dlse, new_out, lse, sink_H), lse.shape, _sizes(new_out))
        return found[0], found[1], found[2].sum((0, 1))


def _gradients(dout: Tensor, dlse: Tensor, new_out: Tensor, lse: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what the kernel ``_backward`` does, with operations that autograd records."""
    share_SBH = share_of_keys(lse, sink_H)
    wide_dout = dout.float()
    delta_SBH = (wide_dout * new_out.float()).sum(-1)
    dsink_SBH = (1 - share_SBH) * (dlse - delta_SBH)
    dout = (wide_dout * share_SBH.unsqueeze(-1)).to(dout.dtype)
    return dout, share_SBH * dlse + (1 - share_SBH) * delta_SBH, dsink_SBH.sum((0, 1))


def _sizes(out: Tensor) -> tuple[int, ...]:
    return out.shape[-1], triton.next_power_of_2(out.shape[-1]), BLOCK
