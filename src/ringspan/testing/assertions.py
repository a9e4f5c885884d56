"""Comparisons of tensors in which NaN is a failure.

``(a - b).abs().max() < bound`` is not safe: ``nan_to_num`` hides a NaN, and ``max`` of Python may skip one. Here a NaN
on one side only is an infinite difference. Two NaN, or two equal infinities, at the same place are equal: lse is
``-inf`` in a row that sees no key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.errors import InputError


def differences(actual: Tensor, expected: Tensor) -> Tensor:
    """Return ``|actual - expected|`` per element, in float64. It is ``inf`` where only one of the two is NaN, and never
    NaN."""
    a, b = actual.detach().double(), expected.detach().double()
    apart = (a - b).abs()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, apart)  # inf - inf is NaN
    return apart.masked_fill(apart.isnan(), torch.inf)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest of :func:`differences`: 0 for tensors without elements. The shapes must be equal."""
    _check_shapes(actual, expected, "")
    return differences(actual, expected).max().item() if actual.numel() else 0.0


def assert_close(
    actual: Tensor,
    expected: Tensor,
    *,
    atol: float | Tensor = 0.0,
    rtol: float = 0.0,
    what: str = "",
    check_dtype: bool = True,
) -> None:
    """Fail unless ``|actual - expected| <= atol + rtol * |expected|`` holds for every element.

    ``atol`` may be a tensor that broadcasts to the elements: an error bound for each. Shapes must be equal, and dtypes
    too unless ``check_dtype=False``. The message says which result differs (``what``), where it differs most and by how
    much.

        >>> assert_close(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), atol=0.1, what="out")
        Traceback (most recent call last):
            ...
        AssertionError: out differs in 1 of 2 elements; worst at (1,): 2.5 instead of 2.0, off by 0.5 where 0.1 is allowed
    """
    name = what or "the tensor"
    _check_shapes(actual, expected, what)
    if check_dtype and actual.dtype != expected.dtype:
        raise AssertionError(f"{name} has dtype {actual.dtype}, expected {expected.dtype}")
    bound = torch.as_tensor(atol, dtype=torch.float64, device=expected.device)
    if rtol:
        bound = bound + rtol * expected.detach().double().abs()
    if not (bound >= 0).logical_or(bound.isnan()).all():
        raise InputError("atol and rtol must not be negative")
    apart = differences(actual, expected)
    bound = bound.expand_as(apart).nan_to_num(nan=0.0, posinf=0.0)  # of an expected NaN or inf: only an equal one is close
    wrong = apart > bound
    if not wrong.any():
        return
    worst = int(torch.where(wrong, apart - bound, -torch.inf).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), apart.shape))
    raise AssertionError(
        f"{name} differs in {int(wrong.sum())} of {apart.numel()} elements; worst at {where}: {actual[where].item()} instead "
        f"of {expected[where].item()}, off by {apart[where].item():.3g} where {bound[where].item():.3g} is allowed"
    )


def _check_shapes(actual: Tensor, expected: Tensor, what: str) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{what or 'the tensor'} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
