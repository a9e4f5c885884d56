"""Attention of several ranks on a GPU against dense float64, and against what PyTorch makes of the same tensors on one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringspan as rs
from ringspan.kernels.reference import dense_attention

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
    """The root of the mean square: the largest of a million differences says more of luck than of the code."""
    return (a.double() - b.double()).square().mean().sqrt().item()


class Compared(NamedTuple):
    """What was computed, what is exact, and the yardstick: plain attention of one device in the same dtype."""

    mine: Tensor
    exact: Tensor
    plain: Tensor

    @property
    def error(self) -> float:
        return error(self.mine, self.exact)

    @property
    def yardstick(self) -> float:
        return error(self.plain, self.exact)


def compared(q: Tensor, k: Tensor, v: Tensor, mask: rs.Mask, *, lse: float = 1e-4, **options: Any) -> list[Compared]:
    """Out and the gradients of q, k and v, of 3 ranks; lse must be within this of what is exact."""
    seen = torch.from_numpy(mask.dense()).cuda()
    exact, plain = dense_attention(q, k, v, seen), sdpa_math(q, k, v, seen)
    mine = rs.LocalWorld(3).attention(q, k, v, mask=mask, return_lse=True, **options)
    assert torch.equal(torch.isinf(mine.lse), torch.isinf(exact.lse))
    assert (mine.lse - exact.lse).nan_to_num().abs().max() < lse
    outs = (mine.out, exact.out, plain)
    dout = torch.randn_like(plain)
    grads = [torch.autograd.grad(out, (q, k, v), dout.to(out.dtype)) for out in outs]
    return [Compared(*outs), *(Compared(*each) for each in zip(*grads, strict=True))]


def sdpa_math(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """PyTorch's own attention by plain operations, all in the dtype of the inputs: unless allowed to, it widens them."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
