"""Compare the reference with the definition in plain Python, and its gradients with finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.kernels import Saved, reference
from ringspan.kernels.reference import dense_attention
from ringspan.masks import Mask
from ringspan.testing.assertions import assert_close

MASKS = {
    "full": rs.full(4, 6),
    "causal": rs.causal(5),
    "documents": rs.documents([2, 3]),
    "some rows see no key": Mask.from_bands([(1, 3, 2, 5, -9, 9)], 5, 6),
    "no row sees any key": rs.causal(3) - rs.causal(3),
    "no keys": rs.full(3, 0),
    "no queries": rs.full(0, 3),
}


def inputs(mask: Mask, heads: int = 4, kv_heads: int = 2, d: int = 3, e: int = 2) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    q_len, k_len = mask.lengths
    sizes = [(heads, q_len, d), (kv_heads, k_len, d), (kv_heads, k_len, e)]
    return [torch.randn(2, *size, generator=source, dtype=torch.float64) for size in sizes]


def attention_in_python(
    q: Tensor, k: Tensor, v: Tensor, seen: np.ndarray, scale: float
) -> tuple[list[list[float]], list[float]]:
    """Return out and lse of one head, by definition: q (S, D), k (T, D), v (T, E)."""
    outs, lses = [], []
    for i in range(len(q)):
        weights = {j: math.exp(scale * sum((q[i] * k[j]).tolist())) for j in np.flatnonzero(seen[i]).tolist()}
        total = sum(weights.values())
        outs.append([sum(w * float(v[j, c]) for j, w in weights.items()) / total if total else 0.0 for c in range(v.shape[1])])
        lses.append(math.log(total) if total else -math.inf)
    return outs, lses


@pytest.mark.parametrize("scale", [None, 0.2, 1.5])
@pytest.mark.parametrize("name", MASKS)
def test_against_the_definition(name: str, scale: float | None) -> None:
    mask = MASKS[name]
    q, k, v = inputs(mask)
    result = dense_attention(q, k, v, torch.from_numpy(mask.dense()), scale=scale)
    for b in range(2):
        for h in range(4):
            out, lse = attention_in_python(
                q[b, h], k[b, h // 2], v[b, h // 2], mask.dense(), 3**-0.5 if scale is None else scale
            )
            assert torch.allclose(result.out[b, h], torch.tensor(out, dtype=torch.float64).reshape(-1, 2), rtol=0, atol=1e-14)
            assert torch.allclose(result.lse[b, h], torch.tensor(lse, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["full", "causal", "documents", "some rows see no key"])
def test_gradients_equal_finite_differences(name: str) -> None:
    mask = MASKS[name]
    leaves = [x.requires_grad_() for x in inputs(mask, heads=2, kv_heads=1)]
    seen = torch.from_numpy(mask.dense())

    def finite_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = dense_attention(q, k, v, seen, scale=0.7)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(finite_lse, leaves)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("name", ["full", "causal", "documents", "some rows see no key", "no row sees any key"])
def test_attend_backward_equals_autograd(name: str, with_dlse: bool) -> None:
    mask = MASKS[name]
    leaves = [x.requires_grad_() for x in inputs(mask)]
    result = dense_attention(*leaves, torch.from_numpy(mask.dense()), scale=0.7)
    source = torch.Generator().manual_seed(2)
    dout = torch.randn(result.out.shape, generator=source, dtype=torch.float64)
    dlse = torch.randn(result.lse.shape, generator=source, dtype=torch.float64).masked_fill(result.lse.isneginf(), 0.0)
    outputs, weights = ([*result], [dout, dlse]) if with_dlse else ([result.out], [dout])
    expected = torch.autograd.grad(outputs, leaves, weights)
    q, k, v = (x.detach() for x in leaves)
    saved = Saved(q, dout, result.out.detach(), result.lse.detach(), dlse if with_dlse else None)
    (found,) = reference.attend_backward(saved, k, v, mask.bands, scale=0.7)
    for a, b in zip((found.dq_BHSD, found.dk_BGTD, found.dv_BGTE), expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["some rows see no key", "no row sees any key"])
def test_rows_that_no_band_covers_are_not_read(name: str) -> None:
    """The rows of a receive buffer that no query needs are uninitialised memory."""
    mask = MASKS[name]
    bands, seen = mask.bands, torch.from_numpy(mask.dense())
    q, k, v = inputs(mask)
    ((_, _, exact),) = reference.attend(q, k, v, bands, scale=0.7)
    dout = torch.ones_like(exact.out)
    (want,) = reference.attend_backward(Saved(q, dout, *exact), k, v, bands, scale=0.7)
    for x, used in ((q, seen.any(1)), (k, seen.any(0)), (v, seen.any(0)), (dout, seen.any(1))):
        x[:, :, ~used] = torch.nan
    (part,) = reference.attend(q, k, v, bands, scale=0.7)
    for actual, expected in zip(part.partial, exact, strict=True):
        assert_close(actual, expected)
    out = exact.out.masked_fill(~seen.any(1)[:, None], torch.nan)
    (found,) = reference.attend_backward(Saved(q, dout, out, exact.lse), k, v, bands, scale=0.7)
    for name in ("dq_BHSD", "dk_BGTD", "dv_BGTE"):
        assert_close(getattr(found, name), getattr(want, name), what=name)


def test_scores_whose_exp_overflows() -> None:
    mask = MASKS["causal"]
    q, k, v = inputs(mask)
    result = dense_attention(q * 1e4, k, v, torch.from_numpy(mask.dense()), scale=1.0)
    assert result.out.isfinite().all()
    assert result.lse.isfinite().all()
    assert result.lse.max() > 710


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computes_in_float64_and_returns_the_accumulation_dtype(dtype: torch.dtype) -> None:
    mask = MASKS["causal"]
    q, k, v = (x.to(dtype) for x in inputs(mask))
    exact = dense_attention(q, k, v, torch.from_numpy(mask.dense()), scale=0.7)
    (part,) = reference.attend(q, k, v, mask.bands, scale=0.7)
    assert exact.out.dtype == exact.lse.dtype == torch.float64
    assert part.partial.out.dtype == part.partial.lse.dtype == torch.float32
    assert torch.equal(part.partial.out, exact.out.float())
