"""Buffers that hold a shard of themselves for the duration of a block.

The buffer's ``data`` is replaced by a new tensor and put back on exit. The original memory is never written, so views
of it stay valid, and restoring it copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.compat.sharding import local_shard
from ringspan.errors import InputError
from ringspan.layouts import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBuffer:
    """A buffer that holds a shard of itself, with the layout, and the data and gradient it had before."""

    buffer: Tensor
    dim: int
    layout: Layout
    whole: Tensor
    grad: Tensor | None


def check_buffer(buffer: Any) -> None:
    """Raise if the buffer cannot be sharded in place."""
    if not isinstance(buffer, Tensor):
        raise InputError(
            f"buffers are tensors, not {type(buffer).__name__}; give the BlockMask of the whole sequence to flex_attention"
        )
    if buffer.requires_grad and not buffer.is_leaf:
        raise InputError(
            f"a buffer of shape {tuple(buffer.shape)} requires grad and is not a leaf; sharding it in place would cut it from "
            "its graph: shard it with _context_parallel_shard, which is differentiable, or detach it"
        )


def shard_in_place(buffer: Tensor, dim: int, layout: Layout, rank: int) -> ShardedBuffer:
    """Replace the buffer's data by this rank's shard, and its gradient, which has the shape of the whole, by None."""
    sharded = ShardedBuffer(buffer=buffer, dim=dim, layout=layout, whole=buffer.data, grad=buffer.grad)
    shard = local_shard(sharded.whole, dim, (layout,), rank)  # may run out of memory, so before the buffer is changed
    buffer.grad = None
    _set_data(buffer, shard)
    return sharded


def restore_buffer(sharded: ShardedBuffer, rank: int) -> None:
    """Give the buffer its data back. The shard's gradient is added to the gradient it had, at this rank's tokens."""
    buffer = sharded.buffer
    grad, buffer.grad = buffer.grad, None
    _set_data(buffer, sharded.whole)
    if grad is None:
        buffer.grad = sharded.grad
    else:
        tokens = torch.from_numpy(sharded.layout.positions(rank)).to(grad.device)
        before = torch.zeros_like(sharded.whole) if sharded.grad is None else sharded.grad
        buffer.grad = before.index_add(sharded.dim, tokens, grad)


def _set_data(buffer: Tensor, data: Tensor) -> None:
    if buffer.is_floating_point() or buffer.is_complex():
        # Autograd remembers the shape of a leaf while a graph uses it, and forgets it when the dtype changes.
        other = torch.float32 if buffer.dtype == torch.float64 else torch.float64
        buffer.data = torch.empty(0, dtype=other, device=data.device)
    buffer.data = data
