"""Flex attention by its definition: dense, float64, functions called on whole tensors of indices. Nothing of ringspan's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringspan.kernels import Partial


def pairs(batch: int, heads: int, q_len: int, k_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The indices b, h, q and k of all pairs, each in a dim of its own."""
    sizes = (batch, heads, q_len, k_len)
    indices = (torch.arange(n).view([n if i == dim else 1 for i in range(4)]) for dim, n in enumerate(sizes))
    b, h, q, k = torch.broadcast_tensors(*indices)
    return b, h, q, k


def dense_flex(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    seen: Tensor | Callable[..., Tensor],
    score_mod: Callable[..., Tensor] | None = None,
    *,
    scale: float | None = None,
) -> Partial:
    """softmax(score_mod(q kᵀ · scale)) v over what is seen, and its lse; a query that sees nothing has 0 and -inf."""
    q, k, v = (x.double() for x in (q_BHSD, k_BGTD, v_BGTE))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    indices = pairs(*q.shape[:3], k.shape[2])
    score = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    score = score if score_mod is None else score_mod(score, *indices)
    seen = seen if isinstance(seen, Tensor) else seen(*indices)
    score = score.masked_fill(~seen, -torch.inf)
    if not k.shape[2]:
        return Partial(q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -torch.inf))
    blind = (score == -torch.inf).all(-1)
    # Rows that see nothing see everything for a moment, so that no nan can get into a gradient.
    score = score.masked_fill(blind.unsqueeze(-1), 0.0)
    out = (score.softmax(-1) @ v).masked_fill(blind.unsqueeze(-1), 0.0)
    return Partial(out, score.logsumexp(-1).masked_fill(blind, -torch.inf))
