"""Accumulators against models that keep nothing and combine everything in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringspan.kernels import GradientAccumulator, OutputAccumulator, Partial, merge
from ringspan.testing.assertions import assert_close

ROWS, BATCH, HEADS = 7, 2, 3
VALUE_DIM = 2  # of outputs
WIDTHS = (2, 3)  # of gradients


class NaNBuffers(Tensor):
    """A tensor whose ``new_empty`` is full of NaN, so that reading unwritten memory is seen."""

    def new_empty(self, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).new_empty(*args, **kwargs).fill_(torch.nan)  # type: ignore[arg-type]


class NoBuffers(Tensor):
    """A tensor whose ``new_empty`` raises."""

    def new_empty(self, shape: Any, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        raise AssertionError(f"a buffer of {shape[0]} rows was allocated")


def output_accumulator(*, keeps: bool = False, like: type[Tensor] = NaNBuffers) -> OutputAccumulator:
    wide = torch.empty(0, dtype=torch.float64).as_subclass(like)
    return OutputAccumulator((ROWS, BATCH, HEADS, VALUE_DIM), like=wide, keeps=keeps)


def gradient_accumulator(*, keeps: bool) -> GradientAccumulator:
    wide = torch.empty(0, dtype=torch.float64).as_subclass(NaNBuffers)
    return GradientAccumulator((ROWS, BATCH, HEADS), WIDTHS, like=wide, keeps=keeps)


row_ranges = st.just((0, ROWS)) | st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda pair: (min(pair), max(pair)))

# -- outputs -----------------------------------------------------------------------------------------------------------


class OutputModel:
    """Every row and head starts empty, and every part is merged at once."""

    def __init__(self) -> None:
        out = torch.zeros(ROWS, BATCH, HEADS, VALUE_DIM, dtype=torch.float64)
        self.partial = Partial(out, torch.full(out.shape[:3], -torch.inf, dtype=torch.float64))

    def add(self, start: int, stop: int, part: Partial, heads: tuple[int, int] | None) -> None:
        rows = Partial(*(x[start:stop, :, slice(*(heads or (0, HEADS)))] for x in self.partial))
        merged = merge(rows, Partial(part.out.permute(2, 0, 1, 3), part.lse.permute(2, 0, 1)))
        rows.out.copy_(merged.out)
        rows.lse.copy_(merged.lse)

    def clear(self, start: int, stop: int) -> None:
        self.partial.out[start:stop] = 0
        self.partial.lse[start:stop] = -torch.inf


def random_partial(rows: int, heads: int, seed: int, dtype: torch.dtype = torch.float64) -> Partial:
    """(B, H, rows, E), with a few rows that see no key."""
    source = torch.Generator().manual_seed(seed)
    out = torch.randn(BATCH, heads, rows, VALUE_DIM, generator=source, dtype=torch.float64)
    lse = torch.randn(BATCH, heads, rows, generator=source, dtype=torch.float64) * 5
    empty = torch.rand(lse.shape, generator=source) < 0.2
    return Partial(out.masked_fill(empty.unsqueeze(-1), 0.0).to(dtype), lse.masked_fill(empty, -torch.inf))


heads_or_all = st.none() | st.tuples(st.integers(0, HEADS - 1), st.integers(1, HEADS)).filter(lambda h: h[0] < h[1])
output_operations = st.lists(
    st.tuples(st.just("add"), row_ranges, heads_or_all, st.integers(0, 2**20))
    | st.tuples(st.just("clear"), row_ranges)
    | st.tuples(st.just("wide"), row_ranges),
    max_size=8,
)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for the last bit: PyTorch's vectorised loops round differently at the unaligned ends of a tensor."""
    few = 4 * torch.finfo(actual.dtype).eps
    assert_close(actual, expected, rtol=few, atol=few, what=what)


@given(operations=output_operations, keeps=st.booleans(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_outputs_equal_the_model(operations: list[tuple[object, ...]], keeps: bool, dtype: torch.dtype) -> None:
    """Parts are wide or narrow; the combination of several is rounded once."""
    accumulator, model = output_accumulator(keeps=keeps), OutputModel()
    for kind, rows, *rest in operations:
        start, stop = rows  # type: ignore[misc]
        if kind == "add":
            heads, seed = rest
            low, high = heads or (0, HEADS)  # type: ignore[misc]
            part = random_partial(stop - start, high - low, seed, dtype)  # type: ignore[arg-type]
            accumulator.add(start, stop, part, heads=heads)  # type: ignore[arg-type]
            model.add(start, stop, part, heads)  # type: ignore[arg-type]
        elif kind == "clear":
            accumulator.clear(start, stop)
            model.clear(start, stop)
        else:
            wide = accumulator.wide(start, stop)
            assert_same(wide.out, model.partial.out[start:stop], "wide out")
            assert_same(wide.lse, model.partial.lse[start:stop], "wide lse")
    result = accumulator.finish()
    assert_same(result.lse, model.partial.lse, "lse")
    assert_same(result.out, model.partial.out.to(result.out.dtype), "out")
    again = accumulator.finish()
    assert torch.equal(again.out, result.out)
    assert torch.equal(again.lse, result.lse)


def test_an_output_of_all_rows_is_kept_in_place() -> None:
    """Only rows with a second part are written, once, rounded once."""
    accumulator = output_accumulator(keeps=True)
    first, second = random_partial(ROWS, HEADS, 0, torch.float32), random_partial(3, HEADS, 1, torch.float32)
    address, before = first.out.data_ptr(), first.out.clone()
    rows = [Partial(x.out.permute(2, 0, 1, 3).double(), x.lse.permute(2, 0, 1)) for x in (first, second)]
    expected = merge(Partial(*(x[2:5] for x in rows[0])), rows[1])
    accumulator.add(0, ROWS, first)
    accumulator.add(2, 5, second)
    out, lse = accumulator.finish()
    assert (out.dtype, out.data_ptr()) == (torch.float32, address)
    assert torch.equal(out[2:5], expected.out.float())
    assert torch.equal(lse[2:5], expected.lse)
    assert torch.equal(out[[0, 1, 5, 6]], before.permute(2, 0, 1, 3)[[0, 1, 5, 6]])


def test_only_a_third_part_allocates_the_wide_buffer() -> None:
    accumulator = output_accumulator(keeps=True, like=NoBuffers)
    for start, stop in ((0, ROWS), (0, 2), (3, ROWS)):
        accumulator.add(start, stop, random_partial(stop - start, HEADS, start, torch.float32))
    with pytest.raises(AssertionError, match="a buffer of 7 rows was allocated"):
        accumulator.add(1, 4, random_partial(3, HEADS, 5, torch.float32))
    assert accumulator.finish().out.dtype == torch.float32


def test_the_first_part_of_a_row_is_copied_bit_for_bit() -> None:
    accumulator, part = output_accumulator(), random_partial(ROWS, HEADS, 0)
    accumulator.add(0, ROWS, part)
    assert torch.equal(accumulator.finish().out, part.out.permute(2, 0, 1, 3))


def test_a_part_of_some_heads_leaves_the_others_empty() -> None:
    accumulator = output_accumulator()
    accumulator.add(2, 5, random_partial(3, 1, 0), heads=(1, 2))
    lse = accumulator.finish().lse
    assert lse[:, :, [0, 2]].isneginf().all()
    assert not lse[2:5, :, 1].isneginf().all()
    assert lse[[0, 1, 5, 6], :, 1].isneginf().all()


# -- gradients ---------------------------------------------------------------------------------------------------------


def random_gradients(rows: int, seed: int, dtype: torch.dtype, widths: tuple[int, ...] = WIDTHS) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, BATCH, HEADS, width, generator=source).to(dtype) for width in widths]


gradient_operations = st.lists(
    st.tuples(st.sampled_from(["add", "add message", "clear", "wide"]), row_ranges, st.integers(0, 99)), max_size=8
)


@given(operations=gradient_operations, keeps=st.booleans())
def test_gradients_equal_the_model(operations: list[tuple[str, tuple[int, int], int]], keeps: bool) -> None:
    """Parts are the narrow gradients of a kernel, or a wide message with all gradients side by side."""
    accumulator, model = gradient_accumulator(keeps=keeps), torch.zeros(ROWS, BATCH, HEADS, sum(WIDTHS), dtype=torch.float64)
    for kind, (start, stop), seed in operations:
        if kind == "add":
            parts = random_gradients(stop - start, seed, torch.float32)
            accumulator.add(start, stop, *parts)
            model[start:stop] += torch.cat(parts, -1)
        elif kind == "add message":
            (message,) = random_gradients(stop - start, seed, torch.float64, (sum(WIDTHS),))
            accumulator.add(start, stop, message)
            model[start:stop] += message
        elif kind == "clear":
            accumulator.clear(start, stop)
            model[start:stop] = 0
        else:
            assert torch.equal(accumulator.wide(start, stop), model[start:stop])
    expected = model.split(list(WIDTHS), -1)
    for found, again, want in zip(accumulator.finish(), accumulator.finish(), expected, strict=True):
        assert torch.equal(found, want.to(found.dtype))
        assert torch.equal(found, again)


def test_gradients_of_all_rows_are_kept_in_place() -> None:
    accumulator = gradient_accumulator(keeps=True)
    first, second = random_gradients(ROWS, 0, torch.float32), random_gradients(2, 1, torch.float32)
    expected = [x.clone() for x in first]
    for x, y in zip(expected, second, strict=True):
        x[3:5] = (x[3:5].double() + y).float()
    addresses = [x.data_ptr() for x in first]
    accumulator.add(0, ROWS, *first)
    accumulator.add(3, 5, *second)
    found = accumulator.finish()
    assert [x.data_ptr() for x in found] == addresses
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
