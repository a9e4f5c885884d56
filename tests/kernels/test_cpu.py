"""Compare the CPU kernel with the reference, for every kind of band."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringspan.kernels import OutputAccumulator, Partial, Saved, accumulation_dtype, cpu, reference, sdpa_calls
from ringspan.masks import Band
from ringspan.masks import table as tables
from ringspan.testing.assertions import assert_close
from tests.hypothesis_strategies import masks

FAR = 10_000

BANDS: dict[str, tuple[int, int, list[Band]]] = {
    "full": (7, 9, [Band(0, 7, 0, 9, -FAR, FAR)]),
    "causal": (9, 9, [Band(0, 9, 0, 9, -8, 0)]),
    "causal, more keys": (5, 9, [Band(0, 5, 0, 9, -4, 4)]),
    "causal, more queries": (9, 5, [Band(0, 9, 0, 5, -8, 0)]),
    "window": (40, 40, [Band(0, 40, 0, 40, -3, 0)]),
    "window to both sides": (40, 40, [Band(0, 40, 0, 40, -3, 5)]),
    "cut below": (9, 9, [Band(0, 9, 0, 9, -2, 8)]),
    "over the diagonal": (9, 9, [Band(0, 8, 1, 9, 1, 8)]),
    "documents": (16, 16, [Band(0, 5, 0, 5, -4, 0), Band(5, 6, 5, 6, 0, 0), Band(6, 16, 6, 16, -9, 0)]),
    "two bands of the same rows": (6, 14, [Band(0, 6, 0, 4, -5, 3), Band(0, 6, 9, 14, 5, 12)]),
    "some rows see nothing": (12, 8, [Band(2, 5, 1, 4, -3, 1), Band(8, 10, 6, 8, -3, -1)]),
    "nothing": (4, 4, []),
    "one pair": (3, 3, [Band(1, 2, 2, 3, 1, 1)]),
    "a large step": (90, 200, [Band(0, 90, 0, 200, -89, 110)]),
    "a large causal one": (300, 300, [Band(0, 300, 0, 300, -299, 0)]),
    "a window of many blocks": (700, 700, [Band(0, 700, 0, 700, -70, 0)]),
    # PyTorch's kernel takes 512 keys at a time. Here some rows see no key of the first of these blocks, or of any.
    "the first 512 keys are hidden": (8, 700, [Band(0, 4, 0, 700, -FAR, FAR), Band(4, 7, 600, 700, -FAR, FAR)]),
    "the middle 512 keys are hidden": (8, 1300, [Band(0, 2, 0, 1300, -FAR, FAR), Band(2, 8, 0, 100, -FAR, FAR)]),
    "a far triangle": (520, 520, [Band(0, 3, 0, 520, -FAR, FAR), Band(3, 8, 515, 520, 508, 516)]),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Half precision is computed in float32, so a partial result has the accuracy of float32.
ALLOWED = {torch.float64: 1e-12, torch.float32: 2e-5}


def tight(bands: Sequence[Band]) -> tuple[Band, ...]:
    return tuple(Band(*row) for row in tables.table(*bands).tolist())


def tensors(q_len: int, k_len: int, dtype: torch.dtype, heads: int, kv_heads: int, d: int, e: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(q_len * 1000 + k_len)
    sizes = [(heads, q_len, d), (kv_heads, k_len, d), (kv_heads, k_len, e), (heads, q_len, e), (heads, q_len)]
    return [torch.randn(2, *size, generator=source, dtype=torch.float64).to(dtype) for size in sizes]


def forward(kernel: Any, q: Tensor, k: Tensor, v: Tensor, bands: Sequence[Band], scale: float, dtype: torch.dtype) -> Partial:
    accumulator = OutputAccumulator((q.shape[2], q.shape[0], q.shape[1], v.shape[-1]), like=torch.empty(0, dtype=dtype))
    for start, stop, (out, lse) in kernel.attend(q, k, v, bands, scale=scale):
        accumulator.add(start, stop, out.movedim(2, 0), lse.movedim(2, 0))
    out, lse = accumulator.finish()
    return Partial(out.movedim(0, 2), lse.movedim(0, 2))


def backward(
    kernel: Any, saved: Saved, k: Tensor, v: Tensor, bands: Sequence[Band], scale: float, dtype: torch.dtype
) -> list[Tensor]:
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (saved.q_BHSD, k, v))
    for part in kernel.attend_backward(saved, k, v, bands, scale=scale):
        dq[:, :, part.rows] += part.dq_BHSD
        dk[:, :, part.keys] += part.dk_BGTD
        dv[:, :, part.keys] += part.dv_BGTE
    return [dq, dk, dv]


def compare(bands: Sequence[Band], given: list[Tensor], scale: float, *, dlse: bool) -> None:
    q, k, v, dout, of_lse = given
    dtype = accumulation_dtype(q.dtype)
    actual = forward(cpu, q, k, v, bands, scale, dtype)
    expected = forward(reference, q.double(), k.double(), v.double(), bands, scale, torch.float64)
    assert actual.out.dtype == actual.lse.dtype == dtype
    assert (actual.out[expected.lse.isneginf()] == 0).all()
    dlse_ = of_lse.to(dtype).masked_fill(expected.lse.isneginf(), 0.0) if dlse else None
    pairs = list(zip(actual, expected, strict=True))
    saved = Saved(q, dout, expected.out.to(dtype), expected.lse.to(dtype), dlse_)
    exact = Saved(*(None if x is None else x.double() for x in (q, dout, expected.out, expected.lse, dlse_)))  # type: ignore[arg-type]
    pairs += zip(
        backward(cpu, saved, k, v, bands, scale, dtype),
        backward(reference, exact, k.double(), v.double(), bands, scale, torch.float64),
        strict=True,
    )
    for a, b in pairs:
        assert_close(a, b, atol=ALLOWED[dtype] * max(1.0, _largest(b)), check_dtype=False)


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if len(finite) else 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BANDS)
def test_every_kind_of_band(name: str, dtype: torch.dtype) -> None:
    q_len, k_len, bands = BANDS[name]
    compare(tight(bands), tensors(q_len, k_len, dtype, 4, 2, 8, 8), 0.35, dlse=False)


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("scale", [0.35, 1.7, 0.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 2), (6, 1)])
@pytest.mark.parametrize(("d", "e"), [(8, 8), (4, 12), (12, 4), (1, 3), (33, 16)])
def test_every_shape(d: int, e: int, heads: int, kv_heads: int, scale: float, dlse: bool) -> None:
    for name in ("causal, more keys", "documents", "some rows see nothing", "window"):
        q_len, k_len, bands = BANDS[name]
        compare(tight(bands), tensors(q_len, k_len, torch.float64, heads, kv_heads, d, e), scale, dlse=dlse)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_gradient_of_lse_in_lower_precision(dtype: torch.dtype) -> None:
    q_len, k_len, bands = BANDS["two bands of the same rows"]
    given = tensors(q_len, k_len, dtype, 4, 2, 8, 5)
    compare(tight(bands), given, 0.35, dlse=True)


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """Set small limits, so that small masks need all kinds of calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa_calls, "WASTE", 6)
        patch.setattr(sdpa_calls, "BLOCK", 3)
        sdpa_calls.make_sdpa_calls.cache_clear()
        yield
    sdpa_calls.make_sdpa_calls.cache_clear()


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=80)
@given(drawn=masks(max_len=16).filter(lambda drawn: min(drawn.mask.lengths) > 0), dlse=st.booleans())
def test_any_mask(drawn: Any, dlse: bool) -> None:
    compare(drawn.mask.bands, tensors(*drawn.mask.lengths, torch.float64, 2, 1, 4, 3), 0.5, dlse=dlse)


@pytest.mark.parametrize("magnitude", [1e-6, 30.0, 300.0])
def test_scores_of_every_magnitude(magnitude: float) -> None:
    """exp of a score may overflow; the softmax does not."""
    q_len, k_len, bands = BANDS["a large step"]
    q, k, v, dout, dlse = tensors(q_len, k_len, torch.float64, 2, 2, 8, 8)
    compare(tight(bands), [q * magnitude, k, v, dout, dlse], 1.0, dlse=True)


def test_strided_views() -> None:
    q_len, k_len, bands = BANDS["documents"]
    given = tensors(q_len, k_len, torch.float64, 4, 2, 8, 8)
    rows_first = [x.movedim(2, 0).contiguous().movedim(0, 2) for x in given]
    assert not rows_first[0].is_contiguous()
    for x, y in zip(
        cpu.attend(*given[:3], tight(bands), scale=0.3), cpu.attend(*rows_first[:3], tight(bands), scale=0.3), strict=True
    ):
        assert torch.allclose(x.partial.out, y.partial.out, atol=1e-14)
    compare(tight(bands), rows_first, 0.3, dlse=True)


def test_a_gradient_of_lse_that_is_zero_changes_no_bit() -> None:
    """An additional column for it would round the scores differently from the forward pass."""
    q, k, v, dout, of_lse = tensors(40, 8, torch.float32, 2, 2, 64, 64)
    bands, scale = tight([Band(0, 40, 0, 8, -FAR, FAR)]), 0.125
    q = q * 30
    out, lse = forward(cpu, q, k, v, bands, scale, torch.float32)
    without, zero, other = (
        backward(cpu, Saved(q, dout, out, lse, dlse), k, v, bands, scale, torch.float32)
        for dlse in (None, torch.zeros_like(of_lse), of_lse)
    )
    assert all(torch.equal(a, b) for a, b in zip(without, zero, strict=True))
    assert not torch.equal(without[0], other[0])
