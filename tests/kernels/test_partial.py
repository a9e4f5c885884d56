"""Partial results: the algebra of ``merge``, and the accumulator against a row-by-row model of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringspan.kernels import Accumulator, Partial, merge
from ringspan.kernels.partial import merge_

DTYPES = [torch.float64, torch.float32]


def of_keys(scores: Tensor, values: Tensor) -> Partial:
    """What a query makes of keys with these scores (…, T) and values (T, E): straight from the definition."""
    if not scores.shape[-1]:
        return Partial(scores.new_zeros(*scores.shape[:-1], values.shape[-1]), scores.new_full(scores.shape[:-1], -torch.inf))
    return Partial(scores.softmax(-1) @ values, scores.logsumexp(-1))


@st.composite
def partials(draw: st.DrawFn, count: int) -> tuple[list[Partial], Partial]:
    """Several partial results of the same queries over different keys, some of them none, and the one over all keys."""
    dtype = draw(st.sampled_from(DTYPES))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sizes = [draw(st.integers(0, 4)) for _ in range(count)]
    spread = draw(st.sampled_from([1.0, 30.0, 300.0]))
    offsets = [draw(st.sampled_from([0.0, -80.0, 80.0, 600.0])) for _ in range(count)]
    scores = [
        torch.randn(3, n, generator=source, dtype=dtype) * spread + offset for n, offset in zip(sizes, offsets, strict=True)
    ]
    values = [torch.randn(n, 2, generator=source, dtype=dtype) for n in sizes]
    parts = [of_keys(s, v) for s, v in zip(scores, values, strict=True)]
    return parts, of_keys(torch.cat(scores, -1), torch.cat(values))


def assert_close(a: Partial, b: Partial) -> None:
    """A share is e to the difference of two lse, so it is as exact as they are: a few ulps at their magnitude."""
    assert torch.equal(a.lse.isneginf(), b.lse.isneginf())
    few = 16 * torch.finfo(a.out.dtype).eps * b.lse.nan_to_num(neginf=0.0).abs().clamp_min(1.0)
    assert ((a.lse - b.lse).nan_to_num(nan=0.0).abs() <= few).all()
    assert ((a.out - b.out).abs() <= few.unsqueeze(-1)).all()


def empty(dtype: torch.dtype = torch.float64) -> Partial:
    return Partial(torch.zeros(3, 2, dtype=dtype), torch.full((3,), -torch.inf, dtype=dtype))


# -- the algebra -------------------------------------------------------------------------------------------------------


@given(drawn=partials(1))
def test_nothing_changes_nothing(drawn: tuple[list[Partial], Partial]) -> None:
    """To the last bit, from both sides."""
    (one,), _ = drawn
    nothing = empty(one.out.dtype)
    for merged in (merge(one, nothing), merge(nothing, one)):
        assert torch.equal(merged.out, one.out)
        assert torch.equal(merged.lse, one.lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_and_nothing_is_nothing(dtype: torch.dtype) -> None:
    merged = merge(empty(dtype), empty(dtype))
    assert (merged.out == 0).all()
    assert merged.lse.isneginf().all()


@given(drawn=partials(2))
def test_it_does_not_matter_which_comes_first(drawn: tuple[list[Partial], Partial]) -> None:
    (a, b), _ = drawn
    assert_close(merge(a, b), merge(b, a))


@given(drawn=partials(3))
def test_it_does_not_matter_which_are_merged_first(drawn: tuple[list[Partial], Partial]) -> None:
    (a, b, c), _ = drawn
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))


@given(drawn=partials(5))
def test_all_parts_make_the_whole(drawn: tuple[list[Partial], Partial]) -> None:
    parts, whole = drawn
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(merged, part)
    assert_close(merged, whole)


EXTREMES = [-torch.inf, -3e38, -1e4, -745.0, -1.0, 0.0, 1.0, 709.0, 1e4, 3e38]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", EXTREMES)
@pytest.mark.parametrize("a", EXTREMES)
def test_extremes(a: float, b: float, dtype: torch.dtype) -> None:
    """No NaN, no overflow; the larger one wins, and equals share."""
    one = Partial(torch.full((1, 1), 0.0 if a == -torch.inf else 1.0, dtype=dtype), torch.tensor([a], dtype=dtype))
    two = Partial(torch.full((1, 1), 0.0 if b == -torch.inf else 3.0, dtype=dtype), torch.tensor([b], dtype=dtype))
    out, lse = (float(x) for x in merge(one, two))
    if a == b:
        assert out == (0.0 if a == -torch.inf else 2.0)
    elif abs(a - b) > 100:
        assert out == (1.0 if a > b else 3.0)
    assert min(float(one.out), float(two.out)) <= out <= max(float(one.out), float(two.out))
    assert max(float(one.lse), float(two.lse)) <= lse <= max(float(one.lse), float(two.lse)) + 0.7


def test_merge_leaves_its_arguments_alone_and_merge_in_place_the_second() -> None:
    a, b = Partial(torch.ones(3, 2), torch.zeros(3)), Partial(torch.zeros(3, 2), torch.zeros(3))
    merged = merge(a, b)
    assert (a.out == 1).all()
    merge_(a, b)
    assert (b.out == 0).all()
    assert torch.equal(a.out, merged.out)
    assert torch.equal(a.lse, merged.lse)


# -- the accumulator ---------------------------------------------------------------------------------------------------

ROWS, BATCH, HEADS, WIDTH = 7, 2, 3, 2


class Room(Tensor):
    """Whose new room held something else before, as room does."""

    def new_empty(self, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).new_empty(*args, **kwargs).fill_(torch.nan)  # type: ignore[arg-type]


def poisoned(*, keeps: bool = False) -> Accumulator:
    like = torch.empty(0, dtype=torch.float64).as_subclass(Room)
    return Accumulator((ROWS, BATCH, HEADS, WIDTH), like=like, keeps=keeps)


class Model:
    """The same with nothing clever in it: every row and head starts empty, and everything is merged."""

    def __init__(self) -> None:
        out = torch.zeros(ROWS, BATCH, HEADS, WIDTH, dtype=torch.float64)
        self.partial = Partial(out, torch.full(out.shape[:3], -torch.inf, dtype=torch.float64))

    def add(self, start: int, stop: int, part: Partial, heads: tuple[int, int] | None) -> None:
        rows = Partial(*(x[start:stop, :, slice(*(heads or (0, HEADS)))] for x in self.partial))
        merged = merge(rows, Partial(part.out.permute(2, 0, 1, 3), part.lse.permute(2, 0, 1)))
        rows.out.copy_(merged.out)
        rows.lse.copy_(merged.lse)

    def clear(self, start: int, stop: int) -> None:
        self.partial.out[start:stop] = 0
        self.partial.lse[start:stop] = -torch.inf


def some_part(rows: int, heads: int, seed: int, dtype: torch.dtype = torch.float64) -> Partial:
    """(B, H, rows, E), with a few rows that saw nothing."""
    source = torch.Generator().manual_seed(seed)
    out = torch.randn(BATCH, heads, rows, WIDTH, generator=source, dtype=torch.float64)
    lse = torch.randn(BATCH, heads, rows, generator=source, dtype=torch.float64) * 5
    unseen = torch.rand(lse.shape, generator=source) < 0.2
    return Partial(out.masked_fill(unseen.unsqueeze(-1), 0.0).to(dtype), lse.masked_fill(unseen, -torch.inf))


spans = st.just((0, ROWS)) | st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda pair: (min(pair), max(pair)))
heads_or_all = st.none() | st.tuples(st.integers(0, HEADS - 1), st.integers(1, HEADS)).filter(lambda h: h[0] < h[1])
moves = st.lists(
    st.tuples(st.just("add"), spans, heads_or_all, st.integers(0, 2**20))
    | st.tuples(st.just("clear"), spans)
    | st.tuples(st.just("wide"), spans),
    max_size=8,
)


def same(a: Tensor, b: Tensor) -> bool:
    """But for the last bit: how PyTorch rounds depends on where in memory a number lies."""
    few = 4 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=few, atol=few)


@given(moves=moves, keeps=st.booleans(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_the_accumulator_against_its_model(moves: list[tuple[object, ...]], keeps: bool, dtype: torch.dtype) -> None:
    """Parts come wide or narrow; what it is of several parts is never narrow."""
    accumulator, model = poisoned(keeps=keeps), Model()
    for kind, span, *rest in moves:
        start, stop = span  # type: ignore[misc]
        if kind == "add":
            heads, seed = rest
            low, high = heads or (0, HEADS)  # type: ignore[misc]
            part = some_part(stop - start, high - low, seed, dtype)  # type: ignore[arg-type]
            accumulator.add(start, stop, part, heads=heads)  # type: ignore[arg-type]
            model.add(start, stop, part, heads)  # type: ignore[arg-type]
        elif kind == "clear":
            accumulator.clear(start, stop)
            model.clear(start, stop)
        else:
            assert same(accumulator.wide(start, stop).out, model.partial.out[start:stop])
    result = accumulator.finish()
    assert same(result.lse, model.partial.lse)
    assert same(result.out, model.partial.out.to(result.out.dtype))
    again = accumulator.finish()
    assert torch.equal(again.out, result.out)
    assert torch.equal(again.lse, result.lse)


def test_a_part_that_has_all_rows_is_kept_where_it_is() -> None:
    """And only the rows that get another one are written, once, rounded once."""
    accumulator = poisoned(keeps=True)
    first, second = some_part(ROWS, HEADS, 0, torch.float32), some_part(3, HEADS, 1, torch.float32)
    at, before = first.out.data_ptr(), first.out.clone()
    rows = [Partial(x.out.permute(2, 0, 1, 3).double(), x.lse.permute(2, 0, 1)) for x in (first, second)]
    want = merge(Partial(*(x[2:5] for x in rows[0])), rows[1])
    accumulator.add(0, ROWS, first)
    accumulator.add(2, 5, second)
    out, lse = accumulator.finish()
    assert (out.dtype, out.data_ptr()) == (torch.float32, at)
    assert torch.equal(out[2:5], want.out.float())
    assert torch.equal(lse[2:5], want.lse)
    assert torch.equal(out[[0, 1, 5, 6]], before.permute(2, 0, 1, 3)[[0, 1, 5, 6]])


def test_only_a_third_part_makes_rows_wide() -> None:
    accumulator = Accumulator(
        (ROWS, BATCH, HEADS, WIDTH), like=torch.empty(0, dtype=torch.float64).as_subclass(NoRoom), keeps=True
    )
    for start, stop in ((0, ROWS), (0, 2), (3, ROWS)):
        accumulator.add(start, stop, some_part(stop - start, HEADS, start, torch.float32))
    with pytest.raises(AssertionError, match="room for 7 rows"):
        accumulator.add(1, 4, some_part(3, HEADS, 5, torch.float32))
    assert accumulator.finish().out.dtype == torch.float32


class NoRoom(Tensor):
    def new_empty(self, shape: Any, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        raise AssertionError(f"room for {shape[0]} rows")


def test_the_first_part_of_a_row_is_copied_to_the_bit() -> None:
    accumulator, part = poisoned(), some_part(ROWS, HEADS, 0)
    accumulator.add(0, ROWS, part)
    assert torch.equal(accumulator.finish().out, part.out.permute(2, 0, 1, 3))


def test_a_part_of_some_heads_leaves_the_others() -> None:
    accumulator = poisoned()
    accumulator.add(2, 5, some_part(3, 1, 0), heads=(1, 2))
    lse = accumulator.finish().lse
    assert lse[:, :, [0, 2]].isneginf().all()
    assert not lse[2:5, :, 1].isneginf().all()
    assert lse[[0, 1, 5, 6], :, 1].isneginf().all()
