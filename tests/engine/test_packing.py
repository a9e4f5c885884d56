"""Packed rows: keys with values equal ``torch.cat``, and saved queries are unchanged by packing and unpacking."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringspan.engine.packing import SavedRows, _has_whole_words, pack_kv, pack_saved, unpack_saved
from ringspan.kernels import accumulation_dtype
from ringspan.plans.shape import saved_bytes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 32), (5, 3), (8, 7), (0, 64)])
def test_packed_keys_and_values_have_the_same_bits(d: int, e: int, dtype: torch.dtype) -> None:
    k, v = (torch.randn(2, 3, 10, dim, dtype=dtype).movedim(2, 0) for dim in (d, e))
    v[0] = float("nan")
    assert torch.equal(bits(pack_kv(k, v)), bits(torch.cat([k, v], -1)))


WHOLE = torch.randn(2, 3, 10, 64)
CASES = {
    "heads first": (WHOLE.movedim(2, 0), True),
    "some rows": (WHOLE.movedim(2, 0)[3:7], True),
    "odd row length": (torch.randn(10, 2, 3, 63), False),
    "odd stride": (torch.randn(10, 2, 3, 65)[..., :64], False),
    "odd offset": (torch.randn(1 + 10 * 6 * 64)[1:].view(10, 2, 3, 64), False),
    "dims before heads": (torch.randn(10, 2, 64, 3).mT, False),
    "the batch last": (torch.randn(10, 3, 64, 2).permute(0, 3, 1, 2), False),
}


@pytest.mark.parametrize(("x", "in_words"), CASES.values(), ids=CASES)
def test_words_are_copied_if_rows_consist_of_them(x: Tensor, in_words: bool) -> None:
    assert _has_whole_words(x) == in_words
    assert torch.equal(pack_kv(x, x), torch.cat([x, x], -1))
    assert pack_kv(x, x).is_contiguous()


# -- saved queries --------------------------------------------------------------------------------------------------------


def saved(dtype: torch.dtype, d: int, e: int, *, with_dlse: bool) -> SavedRows:
    def normal(*width: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(2, 3, 5, *width, dtype=dtype).movedim(2, 0)  # rows first, not contiguous

    lse, dlse = normal(dtype=accumulation_dtype(dtype)), normal(dtype=accumulation_dtype(dtype))
    lse[1, 0, 2] = -torch.inf
    return SavedRows(normal(d), normal(e), normal(e), lse, dlse if with_dlse else None)


@pytest.mark.parametrize("with_dlse", [True, False])
@pytest.mark.parametrize(("d", "e"), [(1, 1), (3, 5), (8, 6), (64, 64), (128, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacking_gives_what_was_packed(dtype: torch.dtype, d: int, e: int, with_dlse: bool) -> None:
    given = saved(dtype, d, e, with_dlse=with_dlse)
    rows = pack_saved(given)
    assert rows.dtype == dtype
    assert rows[0, 0, 0].nbytes == saved_bytes(d, e, dtype.itemsize)
    assert saved_bytes(d, e, dtype.itemsize) % 16 == 0
    # A copy, as after a transfer.
    for name, actual, expected in zip(SavedRows._fields, unpack_saved(rows.clone(), d, e), given, strict=True):
        assert actual is not None
        assert torch.equal(actual, torch.zeros_like(actual) if expected is None else expected), name


def test_tensors_in_packed_rows_are_aligned_if_the_dims_are() -> None:
    """If the dims are multiples of 8, each tensor starts at a multiple of 16 bytes in every row."""
    unpacked = unpack_saved(pack_saved(saved(torch.bfloat16, 64, 128, with_dlse=True)), 64, 128)
    for x in unpacked[:3]:
        assert x.data_ptr() % 16 == 0
        assert all(stride * 2 % 16 == 0 for stride in x.stride()[:-1])
