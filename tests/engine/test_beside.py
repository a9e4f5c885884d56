"""Keys and values side by side, against ``torch.cat``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringspan.engine.beside import _is_in_words, beside

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 32), (5, 3), (8, 7), (0, 64)])
def test_the_same_bits(d: int, e: int, dtype: torch.dtype) -> None:
    k, v = (torch.randn(2, 3, 10, dim, dtype=dtype).movedim(2, 0) for dim in (d, e))
    v[0] = float("nan")
    assert torch.equal(bits(beside(k, v)), bits(torch.cat([k, v], -1)))


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
def test_words_are_used_where_rows_consist_of_them(x: Tensor, in_words: bool) -> None:
    assert _is_in_words(x) == in_words
    assert torch.equal(beside(x, x), torch.cat([x, x], -1))
    assert beside(x, x).is_contiguous()
