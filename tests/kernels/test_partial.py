"""Partial results: the algebra of ``merge``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringspan.kernels import Partial, merge
from ringspan.kernels.partial import merge_
from ringspan.testing.assertions import assert_close

DTYPES = [torch.float64, torch.float32]


def softmax_partial(scores: Tensor, values: Tensor) -> Partial:
    """Compute attention with these scores (…, T) and values (T, E), by definition."""
    if not scores.shape[-1]:
        return Partial(scores.new_zeros(*scores.shape[:-1], values.shape[-1]), scores.new_full(scores.shape[:-1], -torch.inf))
    return Partial(scores.softmax(-1) @ values, scores.logsumexp(-1))


@st.composite
def partials(draw: st.DrawFn, count: int) -> tuple[list[Partial], Partial]:
    """Draw partial results of the same queries over different keys, some empty, and the result over all keys."""
    dtype = draw(st.sampled_from(DTYPES))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sizes = [draw(st.integers(0, 4)) for _ in range(count)]
    spread = draw(st.sampled_from([1.0, 30.0, 300.0]))
    offsets = [draw(st.sampled_from([0.0, -80.0, 80.0, 600.0])) for _ in range(count)]
    scores = [
        torch.randn(3, n, generator=source, dtype=dtype) * spread + offset for n, offset in zip(sizes, offsets, strict=True)
    ]
    values = [torch.randn(n, 2, generator=source, dtype=dtype) for n in sizes]
    parts = [softmax_partial(s, v) for s, v in zip(scores, values, strict=True)]
    return parts, softmax_partial(torch.cat(scores, -1), torch.cat(values))


def assert_same(actual: Partial, expected: Partial) -> None:
    """Allow a few ulps of the magnitude of lse, because a weight is exp of a difference of two lse."""
    few = 16 * torch.finfo(actual.out.dtype).eps * expected.lse.masked_fill(expected.lse.isneginf(), 0.0).abs().clamp_min(1.0)
    assert_close(actual.lse, expected.lse, atol=few, what="lse")
    assert_close(actual.out, expected.out, atol=few.unsqueeze(-1), what="out")


@pytest.mark.parametrize("name", Partial._fields)
def test_assert_same_fails_on_nan(name: str) -> None:
    expected = Partial(torch.ones(3, 2), torch.zeros(3))
    wrong = getattr(expected, name).clone()
    wrong[1] = torch.nan
    with pytest.raises(AssertionError, match=f"{name} differs"):
        assert_same(expected._replace(**{name: wrong}), expected)


def empty(dtype: torch.dtype = torch.float64) -> Partial:
    return Partial(torch.zeros(3, 2, dtype=dtype), torch.full((3,), -torch.inf, dtype=dtype))


@given(drawn=partials(1))
def test_an_empty_partial_result_changes_nothing(drawn: tuple[list[Partial], Partial]) -> None:
    """The result has the same bits, merged from either side."""
    (one,), _ = drawn
    none = empty(one.out.dtype)
    for merged in (merge(one, none), merge(none, one)):
        assert torch.equal(merged.out, one.out)
        assert torch.equal(merged.lse, one.lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_empty_partial_results_are_empty(dtype: torch.dtype) -> None:
    merged = merge(empty(dtype), empty(dtype))
    assert (merged.out == 0).all()
    assert merged.lse.isneginf().all()


@given(drawn=partials(2))
def test_merge_is_commutative(drawn: tuple[list[Partial], Partial]) -> None:
    (a, b), _ = drawn
    assert_same(merge(a, b), merge(b, a))


@given(drawn=partials(3))
def test_merge_is_associative(drawn: tuple[list[Partial], Partial]) -> None:
    (a, b, c), _ = drawn
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))


@given(drawn=partials(5))
def test_merging_all_partial_results_gives_the_whole(drawn: tuple[list[Partial], Partial]) -> None:
    parts, whole = drawn
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(merged, part)
    assert_same(merged, whole)


EXTREMES = [-torch.inf, -3e38, -1e4, -745.0, -1.0, 0.0, 1.0, 709.0, 1e4, 3e38]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", EXTREMES)
@pytest.mark.parametrize("a", EXTREMES)
def test_extreme_lse(a: float, b: float, dtype: torch.dtype) -> None:
    """There is no NaN and no overflow. A much larger lse has all the weight, equal ones have half each."""
    one = Partial(torch.full((1, 1), 0.0 if a == -torch.inf else 1.0, dtype=dtype), torch.tensor([a], dtype=dtype))
    two = Partial(torch.full((1, 1), 0.0 if b == -torch.inf else 3.0, dtype=dtype), torch.tensor([b], dtype=dtype))
    out, lse = (float(x) for x in merge(one, two))
    if a == b:
        assert out == (0.0 if a == -torch.inf else 2.0)
    elif abs(a - b) > 100:
        assert out == (1.0 if a > b else 3.0)
    assert min(float(one.out), float(two.out)) <= out <= max(float(one.out), float(two.out))
    assert max(float(one.lse), float(two.lse)) <= lse <= max(float(one.lse), float(two.lse)) + 0.7


def test_merge_changes_no_argument_and_merge_in_place_only_the_first() -> None:
    a, b = Partial(torch.ones(3, 2), torch.zeros(3)), Partial(torch.zeros(3, 2), torch.zeros(3))
    merged = merge(a, b)
    assert (a.out == 1).all()
    merge_(a, b)
    assert (b.out == 0).all()
    assert torch.equal(a.out, merged.out)
    assert torch.equal(a.lse, merged.lse)
