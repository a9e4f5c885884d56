"""Compare the Triton kernel for sums with float64, in Triton's interpreter if there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
fused_sums = pytest.importorskip("ringspan.kernels.fused_sums", reason="needs triton")

ROWS, BATCH, HEADS = 7, 2, 3
IS_ROUNDED = DEVICE == "cuda"  # Triton's interpreter truncates to bfloat16 instead of rounding


def terms_of(dtypes: list[torch.dtype], d: int) -> list[Tensor]:
    """Return tensors with the strides of a kernel's output, of a part of wider rows, of every second row, or with a last
    dim that is not contiguous."""
    torch.manual_seed(d)
    memory = (
        ((BATCH, HEADS, ROWS, d), lambda x: x.movedim(2, 0)),
        ((ROWS, BATCH, HEADS, d + 3), lambda x: x[..., 3:]),
        ((2 * ROWS, BATCH, HEADS, d), lambda x: x[::2]),
        ((d, ROWS, BATCH, HEADS), lambda x: x.movedim(0, 3)),
    )
    terms = []
    for n, dtype in enumerate(dtypes):
        shape, view = memory[n % len(memory)]
        terms.append(view(torch.randn(shape, device=DEVICE).to(dtype)))
    return terms


def check(into: Tensor, terms: list[Tensor], want: Tensor, dtype: torch.dtype) -> None:
    """Compare with the sum in float64: the roundings of the additions, and one more to the dtype of the result."""
    eps = torch.finfo(dtype).eps
    size = torch.stack([x.double().abs() for x in terms]).sum(0)
    units = 1.01 if into.dtype == torch.bfloat16 and not IS_ROUNDED else 0.51
    allowed = len(terms) * eps * size + (units * torch.finfo(into.dtype).eps * want.abs() if into.dtype != dtype else 0)
    difference = (into.double() - want).abs()
    assert (difference <= allowed).all(), difference.max()


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("d", [5, 64, 128, 256])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 17, 20])
@pytest.mark.parametrize("into_dtype", [torch.float32, *HALVES, torch.float64], ids=str)
def test_sums_equal_float64(into_dtype: torch.dtype, count: int, d: int) -> None:
    """The sum so far in its own dtype, and messages that are wide, or rounded to bfloat16."""
    dtype = torch.float64 if into_dtype == torch.float64 else torch.float32
    terms = terms_of([into_dtype, *[torch.bfloat16 if n % 3 == 2 else dtype for n in range(count - 1)]], d)
    into = torch.full((ROWS + 2, BATCH, HEADS, d), torch.nan, device=DEVICE, dtype=into_dtype)
    fused_sums.write_sum_(into[1:-1], terms, dtype)
    check(into[1:-1], terms, sum((x.double() for x in terms), torch.zeros((), device=DEVICE)), dtype)
    assert into[[0, -1]].isnan().all()


@pytest.mark.parametrize("count", [2, 8, 12])
@pytest.mark.parametrize("into_dtype", [torch.float32, *HALVES, torch.float64], ids=str)
def test_the_sum_may_be_written_in_place(into_dtype: torch.dtype, count: int) -> None:
    dtype = torch.float64 if into_dtype == torch.float64 else torch.float32
    into, *others = terms_of([into_dtype, *[dtype] * (count - 1)], 64)
    terms = [into.clone(), *others]
    fused_sums.write_sum_(into, [into, *others], dtype)
    check(into, terms, sum((x.double() for x in terms), torch.zeros((), device=DEVICE)), dtype)


@pytest.mark.parametrize("into_dtype", HALVES, ids=str)
def test_a_narrow_sum_of_many_terms_is_rounded_once(into_dtype: torch.dtype) -> None:
    """Each message alone is lost when it is added to 1 in half precision."""
    small = 2.0**-12
    into = torch.ones(1, 1, 1, 8, device=DEVICE, dtype=into_dtype)
    messages = [torch.full_like(into, small, dtype=torch.float32) for _ in range(256)]
    fused_sums.write_sum_(into, [into, *messages], torch.float32)
    assert (into == 1 + 256 * small).all()


def test_nan_and_infinity_stay_in_their_row() -> None:
    terms = terms_of([torch.float32] * 3, 8)
    terms[1][2, 0, 1] = torch.nan
    terms[2][5, 1, 0, 3] = torch.inf
    into = torch.empty(ROWS, BATCH, HEADS, 8, device=DEVICE)
    fused_sums.write_sum_(into, terms, torch.float32)
    wrong = ~into.isfinite()
    assert wrong.nonzero().tolist() == [*[[2, 0, 1, n] for n in range(8)], [5, 1, 0, 3]]


def test_no_rows() -> None:
    rows = torch.full((2, 1, 1, 8), torch.nan, device=DEVICE)
    none = torch.zeros(0, 1, 1, 8, device=DEVICE)
    fused_sums.write_sum_(rows[1:1], [none, none], torch.float32)
    assert rows.isnan().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_copy_keeps_all_bits(dtype: torch.dtype) -> None:
    """Elements of packed rows may be halves of a float32, and look like any number or NaN."""
    patterns = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(64, 2, 4, 128).transpose(1, 2)
    into = torch.zeros(64, 4, 2, 136, dtype=dtype, device=DEVICE)
    fused_sums.copy_rows_(into[..., :128], patterns.view(dtype))
    assert torch.equal(into[..., :128].view(torch.int16), patterns)
    assert not into[..., 128:].any()


def test_a_copy_converts() -> None:
    source = torch.linspace(-3, 3, 48, device=DEVICE).view(2, 2, 3, 4)
    into = torch.zeros(2, 2, 3, 4, dtype=torch.float64, device=DEVICE)
    fused_sums.copy_rows_(into, source)
    assert torch.equal(into, source.double())
