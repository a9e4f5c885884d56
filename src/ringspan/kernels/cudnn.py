"""The kernel cudnn: cuDNN's attention, part of PyTorch.

It is the fastest on Hopper and Blackwell without FlashAttention-4.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.errors import KernelError
from ringspan.kernels.kernel import NO_MODS, Inputs
from ringspan.kernels.sdpa_loop import SdpaKernel
from ringspan.torch_private.attention_operators import cudnn_backward, cudnn_forward

MAX_DIM = 128


def unsupported_reason(inputs: Inputs) -> str | None:
    if inputs.device.type != "cuda":
        return f"serves CUDA devices, not {inputs.device.type}"
    if inputs.has_mods:
        return NO_MODS
    major, minor = torch.cuda.get_device_capability(inputs.device)
    if major < 8:
        return f"needs compute capability 8 or higher; this device has {major}.{minor}"
    if not torch.backends.cudnn.is_available():
        return "is not available: this PyTorch was built without cuDNN"
    if inputs.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not {inputs.dtype}"
    if max(inputs.head_dim, inputs.v_dim) > MAX_DIM:
        return f"takes head and value dims up to {MAX_DIM}, not {inputs.head_dim} and {inputs.v_dim}"
    return None


def auto_skip_reason(inputs: Inputs) -> str | None:
    return "needs one call for each document, and for each block of rows of a window" if inputs.windows_or_documents else None


def _forward(
    q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_BHST: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = cudnn_forward(q_BHSD, k_BGTD, v_BGTD, mask_BHST, True, 0.0, is_causal, False, scale=scale)
    return out, lse.view(q_BHSD.shape[:3])


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[-1] > MAX_DIM:
        raise KernelError(
            f'the gradient of lse needs one more column than the values have, and backend="cudnn" takes {MAX_DIM} at most; '
            'use backend="flash" or "fa4"'
        )
    # PyTorch caches cuDNN graphs by the strides of q, k and v alone, so those of dout and out must always be the same.
    dout, out = dout.contiguous(), out.contiguous()
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    # fmt: off
    dq, dk, dv = cudnn_backward(
        dout, q, k, v, out, lse.unsqueeze(-1).contiguous(), unused, unused, mask, None, None,
        q.shape[2], k.shape[2], 0.0, is_causal, scale=scale,
    )
    # fmt: on
    return dq, dk, dv


_kernel = SdpaKernel(forward=_forward, backward=_backward, dim_multiple=8)
attend, attend_backward = _kernel.attend, _kernel.attend_backward
