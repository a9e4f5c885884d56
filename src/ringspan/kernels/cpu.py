"""The CPU kernel: PyTorch's flash attention for CPUs, over any list of bands.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.

Half precision is computed in float32, so that partial results are not rounded before they are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.kernels.kernel import Inputs, Part, Saved, wide, with_dlse
from ringspan.kernels.launches import Launch, launches
from ringspan.kernels.partial import EMPTY_LSE, Partial
from ringspan.masks import Band
from ringspan.masks import table as tables

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def why_not(inputs: Inputs) -> str | None:
    return None if inputs.device.type == "cpu" else f"serves cpu tensors, not {inputs.device.type}"


def attend(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float) -> Iterator[Part]:
    for launch in launches(tuple(bands)):
        q, k, v = _operands(q_BHSD, k_BGTD, v_BGTE, launch)
        mask = _mask(launch, q)
        out, lse = _flash(q, k, v, 0.0, launch.is_causal, attn_mask=mask, scale=scale)
        if mask is not None:
            # The kernel gives a row that sees nothing lse 0; by our word it is -inf.
            lse.masked_fill_((mask == EMPTY_LSE).all(-1), EMPTY_LSE)
        lost = ~torch.isfinite(q.sum(-1))
        if lost.any():
            # The kernel can give 0 for a query of nan; whoever looks for what went wrong must find it.
            out.masked_fill_(lost.unsqueeze(-1), torch.nan)
            lse.masked_fill_(lost, torch.nan)
        yield Part(launch.q0, launch.q1, Partial(out[..., : v_BGTE.shape[-1]], lse))


def attend_backward(
    saved: Saved,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    dq_BHSD: Tensor,
    dk_BGTD: Tensor,
    dv_BGTE: Tensor,
) -> None:
    for launch in launches(tuple(bands)):
        rows = saved.rows(launch.q0, launch.q1)
        dout, out, values = rows.dout_BHSE, rows.out_BHSE, v_BGTE
        if rows.dlse_BHS is not None:
            dout, out, values = with_dlse(dout, out, v_BGTE, rows.dlse_BHS)
        q, k, v = _operands(saved.q_BHSD, k_BGTD, values, launch)
        # A row that sees nothing at all has lse -inf; exp(-inf - 0) is the zero that exp(-inf + inf) is not.
        lse = rows.lse_BHS.masked_fill(rows.lse_BHS == EMPTY_LSE, 0.0)
        dout, out = (_widened(x, q.dtype, v.shape[-1]) for x in (dout, out))
        mask = _mask(launch, q)
        dq, dk, dv = _flash_backward(dout, q, k, v, out, lse, 0.0, launch.is_causal, attn_mask=mask, scale=scale)
        dq_BHSD[:, :, launch.q0 : launch.q1] += dq[..., : saved.q_BHSD.shape[-1]]
        dk_BGTD[:, :, launch.k0 : launch.k1] += dk[..., : k_BGTD.shape[-1]]
        dv_BGTE[:, :, launch.k0 : launch.k1] += dv[..., : v_BGTE.shape[-1]]


def _operands(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
    """The launch's rows, widened, with zero columns where head and value dim differ (the kernel wants them alike)."""
    width = max(q_BHSD.shape[-1], v_BGTE.shape[-1])
    dtype = wide(q_BHSD.dtype)
    q = _widened(q_BHSD[:, :, launch.q0 : launch.q1], dtype, width)
    k = _widened(k_BGTD[:, :, launch.k0 : launch.k1], dtype, width)
    return q, k, _widened(v_BGTE[:, :, launch.k0 : launch.k1], dtype, width)


def _widened(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    x = x.to(dtype)
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _mask(launch: Launch, like: Tensor) -> Tensor | None:
    """The launch's bands as an additive mask of its rectangle."""
    if not launch.bands:
        return None
    shifted = tables.table(*(band.shifted(-launch.q0, -launch.k0) for band in launch.bands))
    seen = torch.from_numpy(tables.dense(shifted, launch.q1 - launch.q0, launch.k1 - launch.k0))
    return like.new_zeros(seen.shape).masked_fill_(~seen, EMPTY_LSE)
