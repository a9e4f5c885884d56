"""Helpers for jobs on workers: a mesh of all of them, equal random tensors on every rank, single-process attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringspan.compat import _cp_options, set_rotate_method
from ringspan.compat.shardings import clear_shardings
from ringspan.testing.assertions import assert_close

ATOL, RTOL = 2e-6, 1e-5


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def qkv(tokens: int, *, batch: int = 2, heads: int = 4, dim: int = 8, keys: int | None = None) -> list[torch.Tensor]:
    """q, k and v of a whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(batch, heads, n, dim, generator=generator) for n in (tokens, keys or tokens, keys or tokens)]


def single_process(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Attention of the whole sequence in float64, and the gradients of the sum of squares of its output."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*wide, is_causal=is_causal)
    grads = torch.autograd.grad(out.square().sum(), wide)
    return out.detach(), grads


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with the tolerances of torch's own tests for float32.

    The absolute tolerance is relative to the largest element if that is above 1: an element that is 0 in exact
    arithmetic is the difference of two numbers of that size, which are rounded.
    """
    assert expected.isfinite().all()
    largest = expected.abs().max().item() if expected.numel() else 0.0
    assert_close(actual.double(), expected, atol=ATOL * max(1.0, largest), rtol=RTOL)


@contextmanager
def options(*, balance: bool | None = None, rotation: str = "allgather") -> Iterator[None]:
    """Change the process-wide settings for a block. ``balance=None`` leaves the order of the tokens as it is."""
    before = _cp_options.enable_load_balance, _cp_options.rotate_method
    if balance is not None:
        _cp_options.enable_load_balance = balance
    set_rotate_method(rotation)
    yield
    _cp_options.rotate_method = before[1]
    if balance is not None:
        _cp_options.enable_load_balance = before[0]


def with_defaults(rank: int, job: Callable[..., Any], *args: Any) -> Any:
    """Run a job with torch's default settings. Workers run many jobs, and sharding changes the settings."""
    clear_shardings()
    _cp_options.enable_load_balance = True
    set_rotate_method("allgather")
    return job(rank, *args)
