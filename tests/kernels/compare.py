"""Compare attention of several ranks with dense float64, and its error with that of PyTorch's own attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringspan as rs
from ringspan.kernels.reference import dense_attention
from ringspan.testing.assertions import assert_close

N = 777
MASKS = {
    "causal": rs.causal(N),
    "full": rs.full(N),
    "window": rs.causal(N) & rs.window(left=100),
    "both sides": rs.full(N) & rs.window(left=64, right=200),
    "documents": rs.documents([100, 300, 50, 327]),
    "prefix": rs.prefix(N, 200),
    "blind rows": rs.full(N) - rs.Mask.from_bands([(100, 200, 0, N, -N, N)], N),
    "not near": ~(rs.causal(N) & rs.window(left=50)),
}


def error(a: Tensor, b: Tensor) -> float:
    """Return the root mean square of the differences. The largest difference varies too much from run to run.

    It is NaN if any element is, and a comparison with NaN fails.
    """
    return (a.double() - b.double()).square().mean().sqrt().item()


class Compared(NamedTuple):
    """A result, the exact one, and that of PyTorch's plain attention in the same dtype, whose error is the limit."""

    actual: Tensor
    exact: Tensor
    plain: Tensor

    @property
    def error(self) -> float:
        return error(self.actual, self.exact)

    @property
    def yardstick(self) -> float:
        return error(self.plain, self.exact)


def compared(q: Tensor, k: Tensor, v: Tensor, mask: rs.Mask, *, lse: float = 1e-4, **options: Any) -> list[Compared]:
    """Return out and the gradients of q, k and v of 3 ranks. ``lse`` is the greatest error that lse may have."""
    seen = torch.from_numpy(mask.dense()).to(q.device)
    exact, plain = dense_attention(q, k, v, seen), sdpa_math(q, k, v, seen)
    actual = rs.LocalWorld(3).attention(q, k, v, mask=mask, return_lse=True, **options)
    assert_close(actual.lse, exact.lse, atol=lse, what="lse", check_dtype=False)
    outs = (actual.out, exact.out, plain)
    dout = torch.randn_like(plain)
    grads = [torch.autograd.grad(out, (q, k, v), dout.to(out.dtype)) for out in outs]
    return [Compared(*outs), *(Compared(*each) for each in zip(*grads, strict=True))]


def sdpa_math(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return PyTorch's attention by plain operations in the dtype of the inputs. By default PyTorch uses float32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
