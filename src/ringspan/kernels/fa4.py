"""The kernel fa4: FlashAttention-4, the fastest on Hopper and Blackwell.

It is ``flash_attn.cute`` of the package flash-attn-4.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.caching.by_digest import cache_by_digest
from ringspan.kernels import flash_loop
from ringspan.kernels.flash_calls import FlashCall
from ringspan.kernels.kernel import NO_MODS, Gradients, Inputs, PartialRows, Saved
from ringspan.kernels.launches import NotRecordable, ObservedKernels
from ringspan.masks import Band
from ringspan.torch_private.flash_attention_4 import COMPILE_CACHE, COMPILED_FUNCTIONS, backward_of, forward_of

PACKAGE = "flash-attn-4"
DISPATCH_KEY = "CUDA"


def unsupported_reason(inputs: Inputs) -> str | None:
    if inputs.device.type != "cuda":
        return f"serves CUDA devices, not {inputs.device.type}"
    if inputs.has_mods:
        return NO_MODS
    major, minor = torch.cuda.get_device_capability(inputs.device)
    if major not in (9, 10, 11):
        return f"needs compute capability 9, 10 or 11 (Hopper, Blackwell); this device has {major}.{minor}"
    if inputs.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not {inputs.dtype}"
    largest = 256 if major == 9 else 128
    for what, dim in (("head dim", inputs.head_dim), ("value dim", inputs.v_dim)):
        if dim % 8 or not 8 <= dim <= largest:
            return f"takes a {what} that is a multiple of 8 up to {largest} on this device, not {dim}"
    return None


@cache_by_digest(1, plain=True)
def is_installed() -> bool:
    try:
        return find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


@cache_by_digest(1, plain=True)
def load() -> ModuleType:
    """Import the package's interface. If that fails, the error says what to install."""
    try:
        from flash_attn.cute import interface
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"FlashAttention-4 needs the module {error.name}, which is not installed: pip install {PACKAGE}", name=error.name
        ) from error
    except ImportError as error:
        raise ImportError(
            f"FlashAttention-4 ({PACKAGE}) is installed, but cannot be imported: {error}", name=error.name
        ) from error
    is_installed.cache_clear()  # it may have been installed after the last call of is_installed
    return interface


@contextmanager
def observed_launches() -> Iterator[None]:
    """Have the package launch its compiled kernels by :func:`ringspan.kernels.launches.launch`, in all threads."""
    functions = [f for f in vars(load()).values() if hasattr(f, COMPILE_CACHE)]
    if missing := set(COMPILED_FUNCTIONS) - {f.__name__ for f in functions}:
        raise NotRecordable(f"this release of {PACKAGE} keeps the kernels of {', '.join(sorted(missing))} elsewhere")
    with _lock:
        before = [getattr(f, COMPILE_CACHE) for f in functions]
        for f, kernels in zip(functions, before, strict=True):
            setattr(f, COMPILE_CACHE, ObservedKernels(kernels))
        try:
            yield
        finally:
            for f, kernels in zip(functions, before, strict=True):
                setattr(f, COMPILE_CACHE, kernels)


_lock = threading.Lock()  # of the attributes that observed_launches replaces


def attend(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float) -> Iterator[PartialRows]:
    return flash_loop.attend(forward, q_BHSD, k_BGTD, v_BGTE, bands, scale=scale)


def attend_backward(
    saved: Saved, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float
) -> Iterator[Gradients]:
    return flash_loop.attend_backward(backward, saved, k_BGTD, v_BGTE, bands, scale=scale)


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: FlashCall, scale: float, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Make one call and return (out, lse). ``into``, if given, is the tensor that out is written to."""
    # The number of values it returns has changed from release to release; the first two have not.
    out, lse, *_ = forward_of(load())(q, k, v, **_options(call), softmax_scale=scale, return_lse=True, out=into)
    return out, lse


def backward(
    saved: Saved, k: Tensor, v: Tensor, call: FlashCall, scale: float, into: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Make one call and return (dq, dk, dv). ``into``, if given, are the tensors that they are written to."""
    q, dout, out, lse, dlse = saved
    d, e = q.shape[-1], v.shape[-1]
    if d != e and q.shape[-2] != k.shape[-2]:  # its backward pass supports grouped queries only if D = E
        q, k, v, dout, out = (F.pad(x, (0, max(d, e) - x.shape[-1])) for x in (q, k, v, dout, out))
    dq, dk, dv = into or (None, None, None)
    dq, dk, dv, *_ = backward_of(load())(
        q,
        k,
        v,
        out,
        dout,
        lse,
        **_options(call),
        softmax_scale=scale,
        dlse=dlse,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dq=dq,
        dk=dk,
        dv=dv,
    )
    return dq[..., :d], dk[..., :d], dv[..., :e]


def _options(call: FlashCall) -> dict[str, Any]:
    window, queries, keys = call.window, call.q_sequences, call.k_sequences
    options: dict[str, Any] = {"window_size_left": window.left, "window_size_right": window.right}
    if window.is_causal:
        options = {"causal": True}
    if queries is not None and keys is not None:
        options |= {"cu_seqlens_q": queries.cu_seqlens, "max_seqlen_q": queries.max_seqlen}
        options |= {"cu_seqlens_k": keys.cu_seqlens, "max_seqlen_k": keys.max_seqlen}
    return options
