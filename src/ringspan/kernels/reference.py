"""The reference: dense attention in float64. Every other kernel, strategy and front end is compared with it.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ringspan.kernels.kernel import NO_MODS, Gradients, Inputs, PartialRows, Saved, accumulation_dtype
from ringspan.kernels.partial import Partial
from ringspan.masks import Band
from ringspan.masks import table as tables


def dense_attention(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    seen_ST: Tensor,
    *,
    scale: float | None = None,
    score_mod: Callable[[Tensor], Tensor] | None = None,
) -> Partial:
    """Return softmax(q kᵀ · scale) v over visible keys, and its lse.

    It is differentiable. A query without keys has out 0 and lse -inf.

    ``score_mod`` changes all scores (B, H, S, T) at once. ``seen`` may have any shape that broadcasts to them.
    """
    q, k, v = q_BHSD.double(), _per_query_head(k_BGTD, q_BHSD), _per_query_head(v_BGTE, q_BHSD)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    score_BHST = q @ k.mT * scale
    score_BHST = (score_BHST if score_mod is None else score_mod(score_BHST)).masked_fill(~seen_ST, -torch.inf)
    if not seen_ST.shape[-1]:
        return Partial(q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -torch.inf))
    top_BHS1 = score_BHST.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).min)
    weight_BHST = (score_BHST - top_BHS1).exp()
    total_BHS1 = weight_BHST.sum(-1, keepdim=True)
    empty = total_BHS1 == 0
    lse = (top_BHS1 + total_BHS1.masked_fill(empty, 1).log()).masked_fill(empty, -torch.inf)
    return Partial(weight_BHST / total_BHS1.masked_fill(empty, 1) @ v, lse.squeeze(-1))


def unsupported_reason(inputs: Inputs) -> str | None:
    return NO_MODS if inputs.has_mods else None


def attend(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float) -> Iterator[PartialRows]:
    seen_ST = _seen(bands, q_BHSD, k_BGTD)
    q, k, v = _zeroed(seen_ST.any(1), q_BHSD), _zeroed(seen_ST.any(0), k_BGTD), _zeroed(seen_ST.any(0), v_BGTE)
    result = dense_attention(q, k, v, seen_ST, scale=scale)
    yield PartialRows(0, q_BHSD.shape[2], Partial(*(x.to(accumulation_dtype(q_BHSD.dtype)) for x in result)))


def attend_backward(
    saved: Saved, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float
) -> Iterator[Gradients]:
    seen_ST = _seen(bands, saved.q_BHSD, k_BGTD)
    q, dout, out = (_zeroed(seen_ST.any(1), x.double()) for x in saved[:3])
    k, v = (_per_query_head(_zeroed(seen_ST.any(0), x), q) for x in (k_BGTD, v_BGTE))
    lse = saved.lse_BHS.double()
    lse_BHS1 = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
    weight_BHST = (q @ k.mT * scale - lse_BHS1).masked_fill(~seen_ST, -torch.inf).exp()
    delta_BHS1 = (dout * out).sum(-1, keepdim=True)
    if saved.dlse_BHS is not None:
        delta_BHS1 = delta_BHS1 - saved.dlse_BHS.double().unsqueeze(-1)
    dscore_BHST = weight_BHST * (dout @ v.mT - delta_BHS1) * scale
    dk, dv = _per_key_head(dscore_BHST.mT @ q, k_BGTD), _per_key_head(weight_BHST.mT @ dout, v_BGTE)
    dq, dk, dv = (x.to(accumulation_dtype(saved.q_BHSD.dtype)) for x in (dscore_BHST @ k, dk, dv))
    yield Gradients(slice(0, q.shape[2]), dq, slice(0, k.shape[2]), dk, dv)


def _seen(bands: Sequence[Band], q: Tensor, k: Tensor) -> Tensor:
    return torch.from_numpy(tables.dense(tables.table(*bands), q.shape[2], k.shape[2])).to(q.device)


def _zeroed(used_S: Tensor, x_BHSD: Tensor) -> Tensor:
    """Fill the rows that no band covers with zeros: they may be uninitialised memory, and 0 times NaN is NaN."""
    return x_BHSD.masked_fill(~used_S[:, None], 0)


def _per_query_head(x_BGTD: Tensor, q_BHSD: Tensor) -> Tensor:
    return x_BGTD.double().repeat_interleave(q_BHSD.shape[1] // x_BGTD.shape[1], dim=1)


def _per_key_head(x_BHTD: Tensor, like_BGTD: Tensor) -> Tensor:
    return x_BHTD.unflatten(1, (like_BGTD.shape[1], -1)).sum(2)
