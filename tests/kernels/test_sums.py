"""Sums of gradients against plain addition, and what they keep instead of copying."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringspan.kernels import Sum
from tests.kernels.test_partial import Room

ROWS, BATCH, HEADS, WIDTHS = 7, 2, 3, (2, 3)


def room(*, keeps: bool) -> Sum:
    return Sum((ROWS, BATCH, HEADS), WIDTHS, like=torch.empty(0, dtype=torch.float64).as_subclass(Room), keeps=keeps)


def some_parts(rows: int, seed: int, dtype: torch.dtype, widths: tuple[int, ...] = WIDTHS) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, BATCH, HEADS, width, generator=source).to(dtype) for width in widths]


spans = st.just((0, ROWS)) | st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda pair: (min(pair), max(pair)))
moves = st.lists(st.tuples(st.sampled_from(["add", "message", "clear", "wide"]), spans, st.integers(0, 99)), max_size=8)


@given(moves=moves, keeps=st.booleans())
def test_it_is_addition(moves: list[tuple[str, tuple[int, int], int]], keeps: bool) -> None:
    """Parts come narrow from a kernel, or as one wide message."""
    total, model = room(keeps=keeps), torch.zeros(ROWS, BATCH, HEADS, sum(WIDTHS), dtype=torch.float64)
    for kind, (start, stop), seed in moves:
        if kind == "add":
            parts = some_parts(stop - start, seed, torch.float32)
            total.add(start, stop, *parts)
            model[start:stop] += torch.cat(parts, -1)
        elif kind == "message":
            (message,) = some_parts(stop - start, seed, torch.float64, (sum(WIDTHS),))
            total.add(start, stop, message)
            model[start:stop] += message
        elif kind == "clear":
            total.clear(start, stop)
            model[start:stop] = 0
        else:
            assert torch.equal(total.wide(start, stop), model[start:stop])
    for mine, again, wanted in zip(total.finish(), total.finish(), model.split(list(WIDTHS), -1), strict=True):
        assert torch.equal(mine, wanted.to(mine.dtype))
        assert torch.equal(mine, again)


def test_gradients_of_all_rows_are_kept_where_they_are() -> None:
    total = room(keeps=True)
    first, second = some_parts(ROWS, 0, torch.float32), some_parts(2, 1, torch.float32)
    want = [x.clone() for x in first]
    for x, y in zip(want, second, strict=True):
        x[3:5] = (x[3:5].double() + y).float()
    places = [x.data_ptr() for x in first]
    total.add(0, ROWS, *first)
    total.add(3, 5, *second)
    found = total.finish()
    assert [x.data_ptr() for x in found] == places
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
