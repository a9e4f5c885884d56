"""Fixtures of the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from ringspan.kernels import flex
from ringspan.testing.threads import one_thread


@pytest.fixture(autouse=True, scope="package")
def one_thread_for_small_tensors() -> Iterator[None]:
    """The tests use many small tensors, for which one thread is faster than several."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def dense_flex_attention() -> Iterator[None]:
    """The flex kernel on CPUs: generate no code, and allow what PyTorch does not support on CPUs."""
    compiled = torch.compile(flex.attend_intervals, dynamic=True, fullgraph=True, backend="eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_compiled", lambda: compiled)
        patch.setattr(torch_flex, "_validate_device", lambda *_: None)
        yield
