"""What users give, and what is meant by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ringspan as rs
from ringspan.frontends.validate import check_scale


@pytest.mark.parametrize(
    ("scale", "head_dim", "meant"),
    [
        (None, 16, 0.25),
        (None, 1, 1.0),
        (None, 0, 1.0),  # refused later, with the tensors
        (0.3, 16, 0.3),
        (-2, 16, -2.0),
        (0, 16, 0.0),
        (np.float32(0.5), 16, 0.5),
        (torch.tensor(0.5), 16, 0.5),
    ],
)
def test_check_scale_returns_the_factor(scale: Any, head_dim: int, meant: float) -> None:
    found = check_scale(scale, head_dim)
    assert (type(found), found) == (float, meant)


@pytest.mark.parametrize("scale", ["x", [1.0], torch.ones(2)])
def test_check_scale_refuses_other_values(scale: Any) -> None:
    with pytest.raises(rs.InputError, match=r"scale must be a number, or None for 1 / √\(head dim\); got"):
        check_scale(scale, 16)
