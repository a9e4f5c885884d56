"""assert_close fails where it has to: on differences, NaN, infinities, shapes and dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.testing.assertions import assert_close, largest_difference

NAN, INF = math.nan, math.inf


def t(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


CLOSE = [
    (t(1.0, 2.0), t(1.0, 2.0), {}),
    (t(1.0, 2.05), t(1.0, 2.0), {"atol": 0.1}),
    (t(1.0, 205.0), t(1.0, 200.0), {"rtol": 0.1}),
    (t(1.05, 2.5), t(1.0, 2.0), {"atol": t(0.1, 0.6)}),
    (t(-INF, INF, NAN), t(-INF, INF, NAN), {}),
    (t(-INF, 1.0), t(-INF, 1.0), {"rtol": 0.1}),
    (t(), t(), {}),
    (t(1.0, dtype=torch.float32), t(1.0), {"check_dtype": False}),
    (torch.tensor(3), torch.tensor(3), {}),
    (torch.tensor([True]), torch.tensor([True]), {}),
]

APART = [
    (t(1.0, 2.5), t(1.0, 2.0), {"atol": 0.1}, r"out differs in 1 of 2 elements; worst at \(1,\): 2\.5 instead of 2\.0"),
    (t(1.05, 2.5), t(1.0, 2.0), {"atol": t(0.1, 0.4)}, r"worst at \(1,\)"),
    (t(1.0, NAN), t(1.0, 2.0), {"atol": 1e300}, r"worst at \(1,\): nan instead of 2\.0"),
    (t(1.0, 2.0), t(1.0, NAN), {"atol": 1e300}, r"2\.0 instead of nan"),
    (t(NAN), t(1.0), {"rtol": 1e300}, "nan instead of 1.0"),
    (t(NAN), t(-INF), {"rtol": 0.1}, "nan instead of -inf"),
    (t(INF), t(-INF), {"atol": INF, "rtol": 0.1}, "inf instead of -inf"),
    (t(5.0), t(INF), {"rtol": 0.1}, "5.0 instead of inf"),
    (t(5.0), t(NAN), {"rtol": 0.1}, "5.0 instead of nan"),
    (t(5.0, 9.0), t(5.0), {"atol": 10.0}, r"out has shape \(2,\), expected \(1,\)"),
    (t(5.0, dtype=torch.float32), t(5.0), {"atol": 10.0}, "out has dtype torch.float32, expected torch.float64"),
    (torch.zeros(2, 3), torch.eye(3)[:2], {}, r"differs in 2 of 6 elements; worst at \(0, 0\)"),
    (torch.tensor([True]), torch.tensor([False]), {}, "differs in 1 of 1"),
]


@pytest.mark.parametrize(("actual", "expected", "options"), CLOSE)
def test_close(actual: Tensor, expected: Tensor, options: dict[str, object]) -> None:
    assert_close(actual, expected, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("actual", "expected", "options", "message"), APART)
def test_apart(actual: Tensor, expected: Tensor, options: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, expected, what="out", **options)  # type: ignore[arg-type]


def test_negative_bound() -> None:
    with pytest.raises(rs.InputError, match="must not be negative"):
        assert_close(t(1.0), t(1.0), atol=-1.0)


def test_gradients_may_be_required() -> None:
    assert_close(t(1.0).requires_grad_(), t(1.0).requires_grad_())


def test_largest_difference() -> None:
    assert largest_difference(t(1.0, -INF, NAN), t(1.5, -INF, NAN)) == 0.5
    assert largest_difference(t(1.0, NAN), t(1.0, 2.0)) == INF
    assert largest_difference(t(), t()) == 0.0
    with pytest.raises(AssertionError, match="shape"):
        largest_difference(t(1.0), t(1.0, 1.0))
