"""``assert_near`` accepts the rounding errors of float32, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.compat.jobs import assert_near, qkv, single_process


def gradients_in_float32(factor: float = 1.0) -> list[torch.Tensor]:
    q, k, v = (x.requires_grad_() for x in qkv(12))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=factor * 8**-0.5)
    return [*torch.autograd.grad(out.square().sum(), (q, k, v))]


def test_a_zero_may_be_the_difference_of_rounded_numbers() -> None:
    """The first query sees one key, so its gradient is 0 in exact arithmetic."""
    dq, exact = gradients_in_float32()[0], single_process(*qkv(12), is_causal=True)[1][0]
    assert not exact[:, :, 0].any()
    assert_near(dq, exact)
    dq[:, :, 0] += 1e-6 * exact.abs().max()
    assert_near(dq, exact)
    dq[:, :, 0] += 2e-6 * exact.abs().max()
    with pytest.raises(AssertionError, match="off by"):
        assert_near(dq, exact)


def test_a_wrong_result_fails() -> None:
    exact = single_process(*qkv(12), is_causal=True)[1]
    for one, expected in zip(gradients_in_float32(factor=1.0001), exact, strict=True):
        with pytest.raises(AssertionError, match="differs in"):
            assert_near(one, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_fail(value: float) -> None:
    expected = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="differs in"):
        assert_near(torch.tensor([1.0, value, 1.0]), expected)
    with pytest.raises(AssertionError):
        assert_near(torch.tensor([1.0, value, 1.0]), torch.tensor([1.0, value, 1.0], dtype=torch.float64))
