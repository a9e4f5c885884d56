"""The caches of planning hold programs and layouts, but no tensor of the user."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import ringspan as rs


def mask_of_a_tensor() -> tuple[rs.Mask, weakref.ref[torch.Tensor]]:
    """A mask whose function captures a tensor that is referenced by nothing else."""
    noise_SS = torch.rand(32, 32) < 0.5
    return rs.mask_mod(lambda b, h, q, k: noise_SS[q, k], 32), weakref.ref(noise_SS)


@pytest.mark.parametrize("given", [{}, {"strategy": "exchange", "layout": "zigzag"}, {"layout": "balanced"}], ids=str)
def test_tensors_of_a_mask_function_are_freed_with_the_plan(given: dict[str, Any]) -> None:
    mask, tensor = mask_of_a_tensor()
    plan = rs.plan(mask, world=2, **given)
    assert plan.at(1).mask is mask
    assert tensor() is not None
    del plan, mask
    gc.collect()
    assert tensor() is None
