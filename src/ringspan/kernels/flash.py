"""The kernel flash: FlashAttention-2, part of PyTorch, for CUDA devices from Ampere on.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.kernels import flash_loop
from ringspan.kernels.flash_calls import FlashCall
from ringspan.kernels.kernel import NO_MODS, Gradients, Inputs, PartialRows, Saved, with_dlse_column
from ringspan.kernels.partial import EMPTY_LSE
from ringspan.masks import Band
from ringspan.torch_private.attention_operators import flash_backward, flash_forward


def unsupported_reason(inputs: Inputs) -> str | None:
    if inputs.device.type != "cuda":
        return f"serves CUDA devices, not {inputs.device.type}"
    if inputs.has_mods:
        return NO_MODS
    major, minor = torch.cuda.get_device_capability(inputs.device)
    if major < 8:
        return f"needs compute capability 8 or higher; this device has {major}.{minor}"
    if inputs.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not {inputs.dtype}"
    if inputs.head_dim != inputs.v_dim:
        return f"takes a value dim equal to the head dim, not {inputs.head_dim} and {inputs.v_dim}"
    if inputs.head_dim % 8 or inputs.head_dim > 256:
        return f"takes a head dim that is a multiple of 8 up to 256, not {inputs.head_dim}"
    return None


def observed_launches() -> AbstractContextManager[None]:
    return nullcontext()  # both passes are operators of PyTorch


def attend(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float) -> Iterator[PartialRows]:
    return flash_loop.attend(_forward, q_BHSD, k_BGTD, v_BGTE, bands, scale=scale)


def attend_backward(
    saved: Saved, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float
) -> Iterator[Gradients]:
    return flash_loop.attend_backward(_backward, saved, k_BGTD, v_BGTE, bands, scale=scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, call: FlashCall, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = flash_forward(
        q, k, v, *_sequences(q, k, call), 0.0, call.window.is_causal, False, scale=scale, **_sides(call)
    )
    if call.q_sequences is not None:
        lse.masked_fill_(lse == torch.inf, EMPTY_LSE)  # FlashAttention-2 writes +inf for a query without keys
    return out, lse


def _backward(saved: Saved, k: Tensor, v: Tensor, call: FlashCall, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, dout, out, lse, dlse = saved
    d, e = q.shape[-1], v.shape[-1]
    if dlse is not None:
        dout, out, v = with_dlse_column(dout, out, v, dlse.transpose(-1, -2))
        width = v.shape[-1] + -v.shape[-1] % 8
        q, k, v, dout, out = (F.pad(x.to(k.dtype), (0, width - x.shape[-1])) for x in (q, k, v, dout, out))
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    dq, dk, dv = flash_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        *_sequences(q, k, call),
        0.0,
        call.window.is_causal,
        unused,
        unused,
        scale=scale,
        **_sides(call),
    )
    return dq[..., :d], dk[..., :d], dv[..., :e]


def _sequences(q: Tensor, k: Tensor, call: FlashCall) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return the cumulative lengths of queries and keys, if there are several sequences, and the greatest lengths."""
    if call.q_sequences is None or call.k_sequences is None:
        return None, None, q.shape[1], k.shape[1]
    return call.q_sequences.cu_seqlens, call.k_sequences.cu_seqlens, call.q_sequences.max_seqlen, call.k_sequences.max_seqlen


def _sides(call: FlashCall) -> dict[str, int]:
    """Return the window as options of the operator, which takes -1 for no limit."""
    if call.window.is_causal:
        return {}
    left, right = (-1 if side is None else side for side in call.window)
    return {"window_size_left": left, "window_size_right": right}
