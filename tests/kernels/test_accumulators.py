"""Accumulators compared with models that combine every partial result at once in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringspan.kernels import GradientAccumulator, OutputAccumulator, Partial, ReceivedRows, accumulators, merge
from ringspan.testing.assertions import assert_close

ROWS, BATCH, HEADS = 7, 2, 3
VALUE_DIM = 2  # of outputs
WIDTHS = (2, 3)  # of gradients


class NaNBuffers(Tensor):
    """A tensor whose ``new_empty`` is full of NaN, so that a read of unwritten memory fails the test."""

    def new_empty(self, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).new_empty(*args, **kwargs).fill_(torch.nan)  # type: ignore[arg-type]


class NoBuffers(Tensor):
    """A tensor whose ``new_empty`` raises."""

    def new_empty(self, shape: Any, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        raise AssertionError(f"a buffer of {shape[0]} rows was allocated")


def output_accumulator(*, reuse_kernel_output: bool = False, like: type[Tensor] = NaNBuffers) -> OutputAccumulator:
    like_tensor = torch.empty(0, dtype=torch.float64).as_subclass(like)
    return OutputAccumulator((ROWS, BATCH, HEADS, VALUE_DIM), like=like_tensor, reuse_kernel_output=reuse_kernel_output)


def gradient_accumulator(*, reuse_kernel_output: bool) -> GradientAccumulator:
    like_tensor = torch.empty(0, dtype=torch.float64).as_subclass(NaNBuffers)
    return GradientAccumulator((ROWS, BATCH, HEADS), WIDTHS, like=like_tensor, reuse_kernel_output=reuse_kernel_output)


row_ranges = st.just((0, ROWS)) | st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda pair: (min(pair), max(pair)))

# -- outputs -----------------------------------------------------------------------------------------------------------


class OutputModel:
    """Every row and head starts empty, and every partial result is merged at once."""

    def __init__(self) -> None:
        out = torch.zeros(ROWS, BATCH, HEADS, VALUE_DIM, dtype=torch.float64)
        self.partial = Partial(out, torch.full(out.shape[:3], -torch.inf, dtype=torch.float64))

    def add(self, start: int, stop: int, partial: Partial, heads: tuple[int, int] | None) -> None:
        rows = Partial(*(x[start:stop, :, slice(*(heads or (0, HEADS)))] for x in self.partial))
        merged = merge(rows, partial)
        rows.out.copy_(merged.out)
        rows.lse.copy_(merged.lse)

    def clear(self, start: int, stop: int) -> None:
        self.partial.out[start:stop] = 0
        self.partial.lse[start:stop] = -torch.inf


def random_partial(rows: int, heads: int, seed: int, dtype: torch.dtype = torch.float64) -> Partial:
    """Return out (rows, B, H, E) and lse with the strides of a kernel's output. A few rows attend to no key."""
    source = torch.Generator().manual_seed(seed)
    out = torch.randn(BATCH, heads, rows, VALUE_DIM, generator=source, dtype=torch.float64)
    lse = torch.randn(BATCH, heads, rows, generator=source, dtype=torch.float64) * 5
    empty = torch.rand(lse.shape, generator=source) < 0.2
    out, lse = out.masked_fill(empty.unsqueeze(-1), 0.0).to(dtype), lse.masked_fill(empty, -torch.inf)
    return Partial(out.movedim(2, 0), lse.movedim(2, 0))


head_ranges = st.tuples(st.integers(0, HEADS - 1), st.integers(1, HEADS)).filter(lambda h: h[0] < h[1])
heads_or_all = st.none() | head_ranges
output_operations = st.lists(
    st.tuples(st.just("add"), row_ranges, heads_or_all, st.integers(0, 2**20))
    | st.tuples(st.just("clear"), row_ranges)
    | st.tuples(st.just("accumulated"), row_ranges),
    max_size=8,
)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Allow the last bits to differ: PyTorch's vectorised loops round differently at the unaligned ends of a tensor."""
    few = 4 * torch.finfo(actual.dtype).eps
    assert_close(actual, expected, rtol=few, atol=few, what=what)


@given(operations=output_operations, reuse_kernel_output=st.booleans(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_outputs_equal_the_model(operations: list[tuple[object, ...]], reuse_kernel_output: bool, dtype: torch.dtype) -> None:
    """Partial results have the accumulation dtype or a lower precision. The combination of several is rounded once."""
    accumulator, model = output_accumulator(reuse_kernel_output=reuse_kernel_output), OutputModel()
    for kind, rows, *rest in operations:
        start, stop = rows  # type: ignore[misc]
        if kind == "add":
            heads, seed = rest
            low, high = heads or (0, HEADS)  # type: ignore[misc]
            partial = random_partial(stop - start, high - low, seed, dtype)  # type: ignore[arg-type]
            if heads is None:
                accumulator.add(start, stop, *partial)
            else:
                accumulator.add_to_heads(start, stop, heads, *partial)  # type: ignore[arg-type]
            model.add(start, stop, partial, heads)  # type: ignore[arg-type]
        elif kind == "clear":
            accumulator.clear(start, stop)
            model.clear(start, stop)
        else:
            out, lse = accumulator.accumulated(start, stop)
            assert_same(out, model.partial.out[start:stop], "accumulated out")
            assert_same(lse, model.partial.lse[start:stop], "accumulated lse")
    result = Partial(*accumulator.finish())
    assert_same(result.lse, model.partial.lse, "lse")
    assert_same(result.out, model.partial.out.to(result.out.dtype), "out")
    again = Partial(*accumulator.finish())
    assert torch.equal(again.out, result.out)
    assert torch.equal(again.lse, result.lse)


def test_an_output_of_all_rows_is_borrowed() -> None:
    """Only rows with a second partial result are written: once, and rounded once."""
    accumulator = output_accumulator(reuse_kernel_output=True)
    first, second = random_partial(ROWS, HEADS, 0, torch.float32), random_partial(3, HEADS, 1, torch.float32)
    address, before = first.out.data_ptr(), first.out.clone()
    rows = [Partial(x.out.double(), x.lse) for x in (first, second)]
    expected = merge(Partial(*(x[2:5] for x in rows[0])), rows[1])
    accumulator.add(0, ROWS, *first)
    accumulator.add(2, 5, *second)
    out, lse = accumulator.finish()
    assert (out.dtype, out.data_ptr()) == (torch.float32, address)
    assert torch.equal(out[2:5], expected.out.float())
    assert torch.equal(lse[2:5], expected.lse)
    assert torch.equal(out[[0, 1, 5, 6]], before[[0, 1, 5, 6]])


def test_only_a_third_partial_result_allocates_the_buffer() -> None:
    accumulator = output_accumulator(reuse_kernel_output=True, like=NoBuffers)
    for start, stop in ((0, ROWS), (0, 2), (3, ROWS)):
        accumulator.add(start, stop, *random_partial(stop - start, HEADS, start, torch.float32))
    with pytest.raises(AssertionError, match="a buffer of 7 rows was allocated"):
        accumulator.add(1, 4, *random_partial(3, HEADS, 5, torch.float32))
    out, _ = accumulator.finish()
    assert out.dtype == torch.float32


def test_the_first_partial_result_of_a_row_is_copied_bit_for_bit() -> None:
    accumulator, partial = output_accumulator(), random_partial(ROWS, HEADS, 0)
    accumulator.add(0, ROWS, *partial)
    out, _ = accumulator.finish()
    assert torch.equal(out, partial.out)


def test_a_partial_result_of_some_heads_leaves_the_others_empty() -> None:
    accumulator = output_accumulator()
    accumulator.add_to_heads(2, 5, (1, 2), *random_partial(3, 1, 0))
    _, lse = accumulator.finish()
    assert lse[:, :, [0, 2]].isneginf().all()
    assert not lse[2:5, :, 1].isneginf().all()
    assert lse[[0, 1, 5, 6], :, 1].isneginf().all()


def test_the_first_partial_results_of_heads_are_copied_and_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "merge_", None)
    accumulator, whole = output_accumulator(), random_partial(ROWS, HEADS, 0)
    for heads in ((1, 3), (0, 1)):
        accumulator.add_to_heads(0, ROWS, heads, *(x[:, :, slice(*heads)] for x in whole))
    out, lse = accumulator.finish()
    assert torch.equal(out, whole.out)
    assert torch.equal(lse, whole.lse)


# -- gradients ---------------------------------------------------------------------------------------------------------


def random_gradients(
    rows: int, seed: int, dtype: torch.dtype, widths: tuple[int, ...] = WIDTHS, heads: int = HEADS
) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, BATCH, heads, width, generator=source).to(dtype) for width in widths]


gradient_kinds = st.sampled_from(["add", "add message", "add together", "add to heads", "clear", "accumulated"])
gradient_operations = st.lists(st.tuples(gradient_kinds, row_ranges, head_ranges, st.integers(0, 99)), max_size=8)


def messages_of(seed: int) -> list[ReceivedRows]:
    """Return up to four messages of any rows, in the accumulation dtype or rounded."""
    source = torch.Generator().manual_seed(seed)
    found = []
    for n in range(int(torch.randint(5, (), generator=source))):
        start, stop = sorted(torch.randint(ROWS + 1, (2,), generator=source).tolist())
        dtype = torch.float32 if n % 2 else torch.float64
        (rows,) = random_gradients(stop - start, seed + n, dtype, (sum(WIDTHS),))
        found.append(ReceivedRows(start, stop, rows))
    return found


@given(
    operations=gradient_operations,
    last=st.none() | st.integers(0, 99),
    reuse_kernel_output=st.booleans(),
)
def test_gradients_equal_the_model(
    operations: list[tuple[str, tuple[int, int], tuple[int, int], int]], last: int | None, reuse_kernel_output: bool
) -> None:
    """Partial gradients are those of a kernel in low precision, or messages with all of them side by side: one, or
    several at once, of which the last ones may be rounded."""
    accumulator, model = (
        gradient_accumulator(reuse_kernel_output=reuse_kernel_output),
        torch.zeros(ROWS, BATCH, HEADS, sum(WIDTHS), dtype=torch.float64),
    )
    for kind, (start, stop), heads, seed in operations:
        if kind == "add":
            partials = random_gradients(stop - start, seed, torch.float32)
            accumulator.add(start, stop, *partials)
            model[start:stop] += torch.cat(partials, -1)
        elif kind == "add message":
            (message,) = random_gradients(stop - start, seed, torch.float64, (sum(WIDTHS),))
            accumulator.add(start, stop, message)
            model[start:stop] += message
        elif kind == "add together":
            accumulator.add_together(messages_of(seed))
            for first, end, rows in messages_of(seed):
                model[first:end] += rows
        elif kind == "add to heads":
            (message,) = random_gradients(stop - start, seed, torch.float64, (sum(WIDTHS),), heads[1] - heads[0])
            accumulator.add_to_heads(start, stop, heads, message)
            model[start:stop, :, slice(*heads)] += message
        elif kind == "clear":
            accumulator.clear(start, stop)
            model[start:stop] = 0
        else:
            (rows,) = accumulator.accumulated(start, stop)
            assert torch.equal(rows, model[start:stop])
    if last is not None:
        accumulator.add_together(messages_of(last), is_last=True)
        for start, stop, rows in messages_of(last):
            model[start:stop] += rows
    expected = model.split(list(WIDTHS), -1)
    for result, again, want in zip(accumulator.finish(), accumulator.finish(), expected, strict=True):
        assert torch.equal(result, want.to(result.dtype))
        assert torch.equal(result, again)


def test_gradients_of_all_rows_are_borrowed() -> None:
    accumulator = gradient_accumulator(reuse_kernel_output=True)
    first, second = random_gradients(ROWS, 0, torch.float32), random_gradients(2, 1, torch.float32)
    expected = [x.clone() for x in first]
    for x, y in zip(expected, second, strict=True):
        x[3:5] = (x[3:5].double() + y).float()
    addresses = [x.data_ptr() for x in first]
    accumulator.add(0, ROWS, *first)
    accumulator.add(3, 5, *second)
    result = accumulator.finish()
    assert [x.data_ptr() for x in result] == addresses
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


def test_messages_that_are_added_last_need_no_buffer() -> None:
    """Borrowed rows, with and without a second partial result, are read and written once, and rounded once."""
    like = torch.empty(0, dtype=torch.float64).as_subclass(NoBuffers)
    accumulator = GradientAccumulator((ROWS, BATCH, HEADS), WIDTHS, like=like, reuse_kernel_output=True)
    first, second = random_gradients(ROWS, 0, torch.float32), random_gradients(2, 1, torch.float32)
    messages = [
        ReceivedRows(a, b, random_gradients(b - a, a, torch.float64, (sum(WIDTHS),))[0]) for a, b in ((0, 4), (1, 6), (1, 4))
    ]
    expected = torch.cat(first, -1).double()
    expected[3:5] += torch.cat(second, -1)
    for start, stop, rows in messages:
        expected[start:stop] += rows
    addresses = [x.data_ptr() for x in first]
    accumulator.add(0, ROWS, *first)
    accumulator.add(3, 5, *second)
    accumulator.add_together(messages, is_last=True)
    result = accumulator.finish()
    assert [x.data_ptr() for x in result] == addresses
    assert torch.equal(torch.cat(result, -1), expected.float())


# -- adoption ----------------------------------------------------------------------------------------------------------


def test_the_first_result_of_all_rows_becomes_the_buffer() -> None:
    total, model = output_accumulator(like=NoBuffers), OutputModel()
    first, second = random_partial(ROWS, HEADS, 0), random_partial(3, HEADS, 1)
    model.add(0, ROWS, Partial(*(x.clone() for x in first)), None)
    model.add(2, 5, second, None)
    adopted = Partial(*(x.contiguous() for x in first))
    total.add(0, ROWS, *adopted, adopt=True)
    total.add(2, 5, *second, adopt=True)  # not of all rows: merged
    out, lse = total.finish()
    assert out.data_ptr() == adopted.out.data_ptr()
    assert_close(out, model.partial.out, atol=1e-14)
    assert_close(lse, model.partial.lse, atol=1e-14)


def test_a_gradient_of_all_rows_becomes_the_buffer() -> None:
    like = torch.empty(0, dtype=torch.float64).as_subclass(NoBuffers)
    total = GradientAccumulator((ROWS, BATCH, HEADS), (2,), like=like)
    first, second = torch.randn(2, ROWS, BATCH, HEADS, 2, dtype=torch.float64)
    expected = first + second
    total.add(0, ROWS, first, adopt=True)
    total.add(0, ROWS, second, adopt=True)
    (found,) = total.finish()
    assert found.data_ptr() == first.data_ptr()
    assert torch.equal(found, expected)


def test_only_contiguous_tensors_of_the_accumulation_dtype_are_adopted() -> None:
    for partial in (random_partial(ROWS, HEADS, 0), random_partial(ROWS, HEADS, 0, torch.float32)):
        total = output_accumulator()
        total.add(0, ROWS, *partial, adopt=True)
        out, lse = total.finish()
        assert out.data_ptr() != partial.out.data_ptr()
        assert torch.equal(out, partial.out.double())
        assert torch.equal(lse, partial.lse)
