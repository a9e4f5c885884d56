"""The CPU kernel: PyTorch's flash attention for CPUs, over any list of bands.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim.

Half precision is computed in float32, so that partial results are not rounded before they are merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.kernels.kernel import NO_MODS, Inputs, accumulation_dtype
from ringspan.kernels.sdpa_loop import SdpaKernel
from ringspan.torch_private.attention_operators import cpu_flash_backward, cpu_flash_forward


def unsupported_reason(inputs: Inputs) -> str | None:
    if inputs.device.type != "cpu":
        return f"serves cpu tensors, not {inputs.device.type}"
    return NO_MODS if inputs.has_mods else None


# The most rows whose scores are in memory at a time.
ROWS = 256


def _forward(
    q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_BHST: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = cpu_flash_forward(q_BHSD, k_BGTD, v_BGTD, 0.0, is_causal, attn_mask=mask_BHST, scale=scale)
    # No score is larger than the product of these norms.
    largest = torch.linalg.vector_norm(q_BHSD).item() * torch.linalg.vector_norm(k_BGTD).item() * max(scale, 1.0)
    if not largest < torch.finfo(q_BHSD.dtype).max:
        # The kernel may return 0 for a query that is NaN or infinite, or that sees such a key. The NaN must reach the
        # result, where it is seen.
        lost = _lost_rows(q_BHSD, k_BGTD, mask_BHST, is_causal, scale)
        out.masked_fill_(lost.unsqueeze(-1), torch.nan)
        lse.masked_fill_(lost, torch.nan)
    return out, lse


def _lost_rows(q_BHSD: Tensor, k_BGTD: Tensor, mask_BHST: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Return the queries whose softmax is not defined, because a visible score is NaN or +inf: (B, H, S)."""
    k_BHTD = k_BGTD.repeat_interleave(q_BHSD.shape[1] // k_BGTD.shape[1], dim=1)
    lost = []
    for start in range(0, q_BHSD.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        score_BHST = q_BHSD[:, :, rows] @ k_BHTD.mT * scale
        is_lost = score_BHST.isnan() | score_BHST.isposinf()
        if mask_BHST is not None:
            is_lost &= mask_BHST[:, :, rows] == 0
        if is_causal:
            is_lost = is_lost.tril(start)
        lost.append(is_lost.any(-1))
    return torch.cat(lost, dim=-1)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = cpu_flash_backward(dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
    return dq, dk, dv


_kernel = SdpaKernel(forward=_forward, backward=_backward, compute_dtype=accumulation_dtype)
attend, attend_backward = _kernel.attend, _kernel.attend_backward
