"""PyTorch can simulate all ranks of a mesh in one process, with tensors that hold every rank's. Some versions of it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])


def on_each_rank(function: F) -> F:
    """Where ranks are simulated, run for each of them."""
    try:
        from torch.distributed._local_tensor import maybe_run_for_local_tensor
    except ImportError:
        return function
    return cast(F, maybe_run_for_local_tensor(function))
