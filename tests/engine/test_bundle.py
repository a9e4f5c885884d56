"""What a query takes along: every dtype and width, odd ones too, comes out as it went in, where kernels can read it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringspan.engine.bundle import bundle, unbundle
from ringspan.kernels import Saved, accumulation_dtype
from ringspan.plans.shape import saved_bytes

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def saved(dtype: torch.dtype, d: int, e: int, *, with_dlse: bool) -> Saved:
    def normal(*width: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(2, 3, 5, *width, dtype=dtype).movedim(2, 0)  # rows first, not as they lie

    lse, dlse = normal(dtype=accumulation_dtype(dtype)), normal(dtype=accumulation_dtype(dtype))
    lse[1, 0, 2] = -torch.inf
    return Saved(normal(d), normal(e), normal(e), lse, dlse if with_dlse else None)


@pytest.mark.parametrize("with_dlse", [True, False])
@pytest.mark.parametrize(("d", "e"), [(1, 1), (3, 5), (8, 6), (64, 64), (128, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype, d: int, e: int, with_dlse: bool) -> None:
    given = saved(dtype, d, e, with_dlse=with_dlse)
    rows = bundle(given)
    assert rows.dtype == dtype
    assert rows[0, 0, 0].nbytes == saved_bytes(d, e, dtype.itemsize)
    assert saved_bytes(d, e, dtype.itemsize) % 16 == 0
    # As it does on the wire, all of it moves as one.
    for name, is_, should in zip(Saved._fields, unbundle(rows.clone(), d, e), given, strict=True):
        assert is_ is not None
        assert torch.equal(is_, torch.zeros_like(is_) if should is None else should), name


def test_rows_are_aligned_where_the_dims_are() -> None:
    """Of dims that are multiples of 8 every part begins at a multiple of 16 bytes, from row to row."""
    parts = unbundle(bundle(saved(torch.bfloat16, 64, 128, with_dlse=True)), 64, 128)
    for part in parts[:3]:
        assert part.data_ptr() % 16 == 0
        assert all(stride * 2 % 16 == 0 for stride in part.stride()[:-1])
