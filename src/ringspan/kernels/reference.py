"""The reference: dense attention in float64. Every other kernel, strategy and front end is compared with it.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ringspan.kernels.containment import independent_parts
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
    dtype = accumulation_dtype(q_BHSD.dtype)
    out = q_BHSD.new_zeros((*q_BHSD.shape[:3], v_BGTE.shape[-1]), dtype=dtype)
    lse = q_BHSD.new_full(q_BHSD.shape[:3], -torch.inf, dtype=dtype)
    for rows, keys, seen_ST in _parts(bands, q_BHSD.device):
        part = dense_attention(q_BHSD[:, :, rows], k_BGTD[:, :, keys], v_BGTE[:, :, keys], seen_ST, scale=scale)
        out[:, :, rows], lse[:, :, rows] = part.out.to(dtype), part.lse.to(dtype)
    yield PartialRows(0, q_BHSD.shape[2], Partial(out, lse))


def attend_backward(
    saved: Saved, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float
) -> Iterator[Gradients]:
    dq, dk, dv = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (saved.q_BHSD, k_BGTD, v_BGTE))
    for rows, keys, seen_ST in _parts(bands, k_BGTD.device):
        q, dout, out, lse = (x[:, :, rows].double() for x in saved[:4])
        k, v = (_per_query_head(x[:, :, keys], q) for x in (k_BGTD, v_BGTE))
        weight_BHST = (q @ k.mT * scale - lse.unsqueeze(-1)).masked_fill(~seen_ST, -torch.inf).exp()
        delta_BHS1 = (dout * out).sum(-1, keepdim=True)
        if saved.dlse_BHS is not None:
            delta_BHS1 -= saved.dlse_BHS[:, :, rows].unsqueeze(-1)
        dscore_BHST = weight_BHST * (dout @ v.mT - delta_BHS1) * scale
        dq[:, :, rows] = (dscore_BHST @ k).to(dq.dtype)
        dk[:, :, keys] = _per_key_head(dscore_BHST.mT @ q, k_BGTD).to(dk.dtype)
        dv[:, :, keys] = _per_key_head(weight_BHST.mT @ dout, v_BGTE).to(dv.dtype)
    yield Gradients(slice(0, dq.shape[2]), dq, slice(0, dk.shape[2]), dk, dv)


def _parts(bands: Sequence[Band], device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the queries, the keys and the visible pairs of each independent part.

    No query and no key is in two of them. Those that no band covers may be uninitialised memory, and are in none.
    """
    for part in independent_parts(tuple(bands)):
        q0, q1, k0, k1, _, _ = zip(*part, strict=True)
        shifted = tables.table(*(band.shifted(-min(q0), -min(k0)) for band in part))
        seen_ST = torch.from_numpy(tables.dense(shifted, max(q1) - min(q0), max(k1) - min(k0))).to(device)
        rows, keys = seen_ST.any(1).nonzero()[:, 0], seen_ST.any(0).nonzero()[:, 0]
        yield rows + min(q0), keys + min(k0), seen_ST[rows][:, keys]


def _per_query_head(x_BGTD: Tensor, q_BHSD: Tensor) -> Tensor:
    return x_BGTD.double().repeat_interleave(q_BHSD.shape[1] // x_BGTD.shape[1], dim=1)


def _per_key_head(x_BHTD: Tensor, like_BGTD: Tensor) -> Tensor:
    return x_BHTD.unflatten(1, (like_BGTD.shape[1], -1)).sum(2)
