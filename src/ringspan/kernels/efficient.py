"""The kernel efficient: PyTorch's memory-efficient attention. It also takes float32, and other head dims.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.kernels.kernel import NO_MODS, Inputs
from ringspan.kernels.sdpa_loop import SdpaKernel
from ringspan.torch_private.attention_operators import efficient_backward, efficient_forward

# The rows of its lse are padded to a multiple of this.
LSE_ROWS = 32


def unsupported_reason(inputs: Inputs) -> str | None:
    if inputs.device.type != "cuda":
        return f"serves CUDA devices, not {inputs.device.type}"
    if inputs.has_mods:
        return NO_MODS
    major, minor = torch.cuda.get_device_capability(inputs.device)
    if (major, minor) < (5, 0) or (inputs.dtype == torch.bfloat16 and major < 8):
        return f"does not compute {inputs.dtype} on compute capability {major}.{minor}"
    if inputs.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"computes in float16, bfloat16 and float32, not {inputs.dtype}"
    return None


def _forward(
    q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_BHST: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = _every_head(k_BGTD, q_BHSD), _every_head(v_BGTD, q_BHSD)
    out, lse, *_ = efficient_forward(q_BHSD, k, v, mask_BHST, True, 0.0, is_causal, scale=scale)
    return out, lse[..., : q_BHSD.shape[2]]


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    padded = F.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=torch.inf)  # exp(score - inf) = 0
    # It assumes that out and dout are contiguous as (B, S, H, D).
    dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    keys, values = _every_head(k, q), _every_head(v, q)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = efficient_backward(
        dout, q, keys, values, mask, out, padded, unused, unused, 0.0, wanted, is_causal, scale=scale
    )
    return dq, _shared(dk, k), _shared(dv, v)


def _every_head(x_BGTD: Tensor, q_BHSD: Tensor) -> Tensor:
    """Repeat each key head for the query heads that share it: this kernel does not support grouped queries."""
    return x_BGTD.repeat_interleave(q_BHSD.shape[1] // x_BGTD.shape[1], dim=1)


def _shared(dx_BHTD: Tensor, x_BGTD: Tensor) -> Tensor:
    """Sum the gradients of the query heads that share a key head."""
    return dx_BHTD.unflatten(1, (x_BGTD.shape[1], -1)).sum(2, dtype=torch.float32)


_kernel = SdpaKernel(forward=_forward, backward=_backward, dim_multiple=8)
attend, attend_backward = _kernel.attend, _kernel.attend_backward
