"""Buffers that are shares of themselves for as long as a block lasts.

A buffer is given other memory, and then its own again. Its own is never written to, so that views, what they are views of and
the whole sequence are safe, and giving back costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.compat.sharding import share_of
from ringspan.errors import InputError
from ringspan.layouts import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """A buffer that is its own share, how it was cut, and what it is to have again."""

    buffer: Tensor
    dim: int
    layout: Layout
    whole: Tensor
    grad: Tensor | None


def check_buffer(buffer: Any) -> None:
    """Whether it can be changed in place."""
    if not isinstance(buffer, Tensor):
        raise InputError(
            f"buffers are tensors, not {type(buffer).__name__}; give the BlockMask of the whole sequence to flex_attention"
        )
    if buffer.requires_grad and not buffer.is_leaf:
        raise InputError(
            f"a buffer of shape {tuple(buffer.shape)} is computed from what needs gradients, and would lose them if changed in "
            "place: take its share with _context_parallel_shard, which is differentiable, or detach it"
        )


def lend(buffer: Tensor, dim: int, layout: Layout, rank: int) -> Lent:
    """Make a buffer its own share. A gradient that it has is put aside: it has the shape of the whole."""
    lent = Lent(buffer=buffer, dim=dim, layout=layout, whole=buffer.data, grad=buffer.grad)
    share = share_of(lent.whole, dim, (layout,), rank)  # first: if there is no room for it, nothing has happened
    buffer.grad = None
    _give(buffer, share)
    return lent


def give_back(lent: Lent, rank: int) -> None:
    """Make it whole again. A gradient of the share becomes one of the whole, zero for the tokens of other ranks."""
    grad, lent.buffer.grad = lent.buffer.grad, None
    _give(lent.buffer, lent.whole)
    if grad is None:
        lent.buffer.grad = lent.grad
    else:
        tokens = torch.from_numpy(lent.layout.positions(rank)).to(grad.device)
        before = torch.zeros_like(lent.whole) if lent.grad is None else lent.grad
        lent.buffer.grad = before.index_add(lent.dim, tokens, grad)


def _give(buffer: Tensor, data: Tensor) -> None:
    if buffer.is_floating_point() or buffer.is_complex():
        # Autograd keeps the shape of a leaf for as long as any graph needs it, but for one whose dtype changes.
        other = torch.float32 if buffer.dtype == torch.float64 else torch.float64
        buffer.data = torch.empty(0, dtype=other, device=data.device)
    buffer.data = data
