"""Compare results of attention with dense attention in float64, with bounds for the error.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.

In float64 a result may be off by 1e-12, relative to the largest magnitude of the expected result (at least 1). In lower
precision the bound is twice the error of PyTorch's attention in the same dtype, in one process, through the same mask,
plus a few ulps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.kernels import accumulation_dtype
from ringspan.kernels.reference import dense_attention
from ringspan.testing.assertions import differences
from ringspan.testing.fuzz import Case

EXACT = 1e-12
TIMES_TORCH = 2.0
# PyTorch may be exact by chance where another order of the same sums is not: the gradient of a query that sees one key
# is the difference of two equal numbers. So this many ulps are always allowed: of the dtype, and of float32, in which
# sums are accumulated, at the magnitude of the terms (see :func:`terms`).
FLOOR_ULPS = 2


class Results(NamedTuple):
    """The results of attention, forward and backward."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Tensors(NamedTuple):
    """The inputs of attention and the weights of a loss of out and lse: whole sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None


class Figure(NamedTuple):
    """The error of a result and its bound, both relative to the largest magnitude of the expected result (at least
    1)."""

    error: float
    allowed: float


# -- inputs and expected results ---------------------------------------------------------------------------------------


def tensors(case: Case, mask: rs.Mask) -> Tensors:
    """Return the tensors of a case, the same on every machine and rank; rounded to the case's dtype."""
    q_len, k_len = mask.lengths
    source = torch.Generator().manual_seed((case.seed * 1_000_003 + case.index) % 2**63)
    dtype: torch.dtype = getattr(torch, case.dtype)

    def normal(heads: int, *size: int) -> Tensor:
        return torch.randn(case.batch, heads, *size, generator=source, dtype=torch.float64)

    return Tensors(
        q=normal(case.heads, q_len, case.head_dim).to(dtype),
        k=normal(case.kv_heads, k_len, case.head_dim).to(dtype),
        v=normal(case.kv_heads, k_len, case.v_dim).to(dtype),
        dout=normal(case.heads, q_len, case.v_dim).to(dtype),
        dlse=normal(case.heads, q_len).to(accumulation_dtype(dtype)) if case.lse else None,
    )


def dense(given: Tensors, seen_ST: Tensor, scale: float | None) -> Results:
    """Return the expected results: the reference, in float64."""
    q, k, v = (x.double().requires_grad_() for x in given[:3])
    dlse = None if given.dlse is None else given.dlse.double()
    return results_of(dense_attention(q, k, v, seen_ST, scale=scale), [q, k, v], given.dout.double(), dlse)


def torch_alone(given: Tensors, seen_ST: Tensor, scale: float | None) -> Results:
    """Compute PyTorch's attention in the dtype of the tensors, in one process; lse and its gradient from scores in
    float32.

    A query that sees no key is left out, because PyTorch may return NaN for it. It contributes to no gradient, so the
    other rows do not change. Its own rows are 0 and -inf, as they must be.
    """
    sees = seen_ST.any(-1)
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    q, k, v = leaves
    per_head = q.shape[1] // k.shape[1]
    q = q[:, :, sees]
    k, v = k.repeat_interleave(per_head, 1), v.repeat_interleave(per_head, 1)
    out = given.dout.new_zeros(given.dout.shape)
    lse = given.dout.new_full(given.dout.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    if sees.any():
        rows, mask = sees.nonzero()[:, 0], seen_ST[sees]
        scores = q.to(lse.dtype) @ k.to(lse.dtype).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        out = out.index_copy(2, rows, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
        lse = lse.index_copy(2, rows, scores.masked_fill(~mask, -torch.inf).logsumexp(-1))
    return results_of(rs.Partial(out, lse), leaves, given.dout, given.dlse)


def results_of(result: rs.Partial, leaves: Sequence[Tensor], dout: Tensor, dlse: Tensor | None) -> Results:
    """Run forward and backward: the gradients of ``sum(out * dout) + sum(lse * dlse)``."""
    outputs, weights = ([result.out], [dout]) if dlse is None else ([*result], [dout, dlse])
    if not any(x.requires_grad for x in outputs):  # no query sees any key
        return Results(*result, *(torch.zeros_like(x) for x in leaves))
    grads = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    filled = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True))
    return Results(result.out.detach(), result.lse.detach(), *filled)


# -- comparing ---------------------------------------------------------------------------------------------------------


def allowances(case: Case, given: Tensors, seen_ST: Tensor, expected: Results) -> dict[str, float]:
    """Return, for each result, the largest error allowed, relative as in :class:`Figure`."""
    if case.dtype == "float64":
        return dict.fromkeys(Results._fields, EXACT)
    alone = compare(torch_alone(given, seen_ST, case.scale), expected, dict.fromkeys(Results._fields, 0.0))
    rounded, summed = (terms(given, expected, seen_ST, case.scale, recomputed=x) for x in (False, True))
    sums = torch.finfo(torch.float32).eps
    allowed = {}
    for name in Results._fields:
        eps = sums if name == "lse" else torch.finfo(given.q.dtype).eps
        floor = FLOOR_ULPS * (eps * _largest(getattr(rounded, name)) + sums * _largest(getattr(summed, name)))
        allowed[name] = TIMES_TORCH * alone[name].error + floor / max(1.0, _largest(getattr(expected, name)))
    return allowed


def terms(given: Tensors, expected: Results, seen_ST: Tensor, scale: float | None, *, recomputed: bool) -> Results:
    """Return the magnitude of the terms that are summed to each result: the root of their sum of squares, as rounding
    errors add up.

    ``recomputed``: the weight of a key is recomputed as exp(score - lse), so its relative error grows with the
    exponent.
    """
    q, k, v, dout = (x.double().abs() for x in given[:4])
    per_head = q.shape[1] // k.shape[1]
    k, v, signed_k = (x.repeat_interleave(per_head, 1) for x in (k, v, given.k.double()))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lse_BHS1 = expected.lse.nan_to_num(neginf=0.0).unsqueeze(-1)
    exponent_BHST = lse_BHS1.abs() + q @ k.mT * scale
    weight_BHST = (given.q.double() @ signed_k.mT * scale - lse_BHS1).masked_fill(~seen_ST, -torch.inf).exp()
    weight_BHST = weight_BHST * (1.0 + exponent_BHST) if recomputed else weight_BHST
    dscore_BHST = weight_BHST * (dout @ v.mT + (dout * expected.out.abs()).sum(-1, keepdim=True) + 1.0) * scale

    def of_keys(squares_BHTD: Tensor) -> Tensor:
        return squares_BHTD.unflatten(1, (-1, per_head)).sum(2).sqrt()

    return Results(
        out=(weight_BHST**2 @ v**2).sqrt(),
        lse=exponent_BHST.masked_fill(~seen_ST, 0.0),
        dq=(dscore_BHST**2 @ k**2).sqrt(),
        dk=of_keys((dscore_BHST**2).mT @ q**2),
        dv=of_keys((weight_BHST**2).mT @ dout**2),
    )


def compare(got: Results, expected: Results, allowed: dict[str, float], *, whole: Results | None = None) -> dict[str, Figure]:
    """Return the errors of the results. A NaN, or a -inf in the wrong place, is an infinite error.

    ``whole``: if the results are of some tokens only, the expected results of all tokens, whose largest magnitude
    counts.
    """
    figures = {}
    for name in Results._fields:
        result, want = getattr(got, name), getattr(expected, name)
        if result.shape != want.shape:
            figures[name] = Figure(torch.inf, allowed[name])
            continue
        largest = max(1.0, _largest(want if whole is None else getattr(whole, name)))
        figures[name] = Figure(float(differences(result, want).max()) / largest if want.numel() else 0.0, allowed[name])
    return figures


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
