"""Flex attention by its definition: the dense reference, with the user's functions called on tensors of all indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringspan.kernels import Partial
from ringspan.kernels.reference import dense_attention


def pairs(batch: int, heads: int, q_len: int, k_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The indices b, h, q and k of all pairs, broadcast to (batch, heads, q_len, k_len)."""
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
    """Dense attention with a ``score_mod(score, b, h, q, k)``; ``seen`` is a tensor or a ``mask_mod(b, h, q, k)``."""
    indices = pairs(*q_BHSD.shape[:3], k_BGTD.shape[2])
    seen = seen if isinstance(seen, Tensor) else seen(*indices)
    on_scores = None if score_mod is None else lambda score: score_mod(score, *indices)
    return dense_attention(q_BHSD, k_BGTD, v_BGTE, seen, scale=scale, score_mod=on_scores)
