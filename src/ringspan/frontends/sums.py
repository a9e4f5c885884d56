"""Sums over ranks: of losses, with the gradient that is right, and of the gradients themselves.

A loss over several ranks is one number that all of them have. On each rank its gradient is that of the rank's own *share*, and
a parameter that all ranks use gets its gradient in parts, which somebody must put together::

    rank 0:  x0 ─┐                     ┌─ d loss / d x0 ─► part of w.grad ─┐
    rank 1:  x1 ─┼─► loss, on all of ──┼─ d loss / d x1 ─► part of w.grad ─┼─► summed: sum_gradients, an all-reduce
    rank 2:  x2 ─┘   them the same     └─ d loss / d x2 ─► part of w.grad ─┘   or averaged: DDP, FSDP

Who averages divides by the number of ranks; ``grads="averaged"`` multiplies by it beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.errors import InputError
from ringspan.frontends.attention import Group
from ringspan.frontends.dtensor import is_dtensor
from ringspan.transports import ProcessGroupTransport, as_transport

Grads = Literal["summed", "averaged"]


def groups_of(over: Group) -> list[ProcessGroupTransport]:
    """The groups whose sums, one after the other, are the sum over all ranks: one for each axis of a mesh."""
    if isinstance(over, DeviceMesh) and over.ndim > 1:
        return [ProcessGroupTransport(over.get_group(axis)) for axis in range(over.ndim)]
    return [as_transport(over)]


def all_sum(x: Tensor, groups: Sequence[ProcessGroupTransport]) -> Tensor:
    for group in groups:
        x = group.all_reduce_sum(x)
    return x


def sum_of_shares(share: Tensor, groups: Sequence[ProcessGroupTransport], grads: Grads) -> Tensor:
    """The sum of every rank's share, on every rank; differentiable in this rank's."""
    if grads not in ("summed", "averaged"):
        raise InputError(f'grads must be "summed" or "averaged", what will be done with them over the ranks; not {grads!r}')
    result: Tensor = _SumOfShares.apply(share, groups, grads)
    return result


class _SumOfShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, groups: Sequence[ProcessGroupTransport], grads: Grads) -> Tensor:
        ctx.times = 1
        for group in groups:
            ctx.times *= group.world if grads == "averaged" else 1
        return all_sum(share, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.times, None, None


def sum_gradients(parameters: Iterable[Tensor], groups: Sequence[ProcessGroupTransport]) -> None:
    """Sum the gradients of parameters over ranks, in place. One that is missing on all ranks stays missing."""
    by_kind: dict[Any, list[Tensor]] = {}
    for p in parameters:
        if p.requires_grad:
            by_kind.setdefault((p.dtype, p.device), []).append(p)
    for same in by_kind.values():
        # One message for all of a kind: many small ones would each wait for the wire.
        shards = [_local(p) for p in same]
        there = torch.tensor([p.grad is not None for p in same], dtype=same[0].dtype, device=same[0].device)
        parts = (torch.zeros_like(x) if p.grad is None else _local(p.grad) for p, x in zip(same, shards, strict=True))
        flat = torch.cat([there, *(part.flatten() for part in parts)])
        there, *sums = all_sum(flat, groups).split([len(same), *(x.numel() for x in shards)])
        for p, shard, total, used in zip(same, shards, sums, there.tolist(), strict=True):
            if used and p.grad is None:
                p.grad = torch.zeros_like(p)
            if used and p.grad is not None:
                _local(p.grad).copy_(total.view_as(shard))


def _local(x: Tensor) -> Tensor:
    """What this rank holds of a parameter that tensor parallelism has split, else all of it. Not a copy."""
    return x.to_local().detach() if is_dtensor(x) else x.detach()
