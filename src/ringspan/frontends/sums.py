"""Sums over ranks: of losses, with correct gradients, and of gradients.

A loss over several ranks is one number, the same on all of them. Its gradient on a rank is with respect to the rank's
own *share* of the sum. A parameter that all ranks use gets a part of its gradient on each, and the parts must be
summed::

    rank 0:  x0 ─┐                     ┌─ d loss / d x0 ─► part of w.grad ─┐
    rank 1:  x1 ─┼─► loss, on all of ──┼─ d loss / d x1 ─► part of w.grad ─┼─► summed: sum_gradients, an all-reduce
    rank 2:  x2 ─┘   them the same     └─ d loss / d x2 ─► part of w.grad ─┘   or averaged: DDP, FSDP

DDP and FSDP divide by the number of ranks; ``grads="averaged"`` multiplies by it beforehand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ringspan.errors import InputError
from ringspan.frontends.dtensor import is_dtensor
from ringspan.transports import ProcessGroupTransport

Grads = Literal["summed", "averaged"]


def all_sum(x: Tensor, groups: Sequence[ProcessGroupTransport], kind: str, options: str = "") -> Tensor:
    """Return the sum over all ranks. ``kind`` names the call, and ``options`` must be equal on all ranks."""
    for group in groups:
        x = group.all_reduce_sum(x, label=kind, options=options)
    return x


def sum_of_shares(share: Tensor, groups: Sequence[ProcessGroupTransport], grads: Grads, kind: str) -> Tensor:
    """Return the sum of the shares of all ranks, on every rank; differentiable in the share of this rank.

    ``kind`` names the call. It is compared over the ranks, with ``grads``.
    """
    if grads not in ("summed", "averaged"):
        raise InputError(f'grads must be "summed" or "averaged", how the gradients are combined over ranks; not {grads!r}')
    result: Tensor = _SumOfShares.apply(share, groups, grads, kind)
    return result


class _SumOfShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, groups: Sequence[ProcessGroupTransport], grads: Grads, kind: str) -> Tensor:
        ctx.times = 1
        for group in groups:
            ctx.times *= group.world if grads == "averaged" else 1
        return all_sum(share, groups, kind, f'grads="{grads}"')

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.times, None, None, None


def sum_gradients(parameters: Iterable[Tensor], groups: Sequence[ProcessGroupTransport]) -> None:
    """Sum the gradients of parameters over ranks, in place. A gradient that is None on all ranks stays None.

    The sum is computed in at least float32 and rounded once to the dtype of the gradient. Extra memory is one bucket of
    ``BUCKET_BYTES`` for each dtype and device, filled again and again::

        gradients   | a  bf16 | b  bf16            | c  bf16 |
        buckets     | float32        | float32        | … |      each: copy in, all-reduce, copy back

    A float32 or float64 gradient of at least a bucket is summed where it is. A gradient that is not contiguous is
    summed in a contiguous copy. Ranks may hold the gradient of a parameter with different strides.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p in parameters:
        if p.requires_grad:
            by_kind.setdefault((torch.promote_types(p.dtype, torch.float32), p.device), []).append(p)
    for (dtype, device), alike in by_kind.items():
        present = torch.tensor([p.grad is not None for p in alike], dtype=torch.int32, device=device)
        # Comparing the calls here is enough, and raises. Comparing in a bucket would be another pass over its memory.
        used = _all_sum_(present, groups, _described(alike), compare_calls=True).tolist()
        bucket = _Bucket(dtype, device, groups)
        for p, ranks in zip(alike, used, strict=True):
            if ranks and p.grad is None:
                p.grad = torch.zeros_like(p)
            if ranks and p.grad is not None:
                bucket.add(_local(p.grad), p.dtype)
        bucket.flush()


BUCKET_BYTES = 32 * 2**20


class _Bucket:
    """A buffer through which gradients are summed.

    The collectives depend on the dtypes and sizes of the parameters alone, which are the same on all ranks. They must
    not depend on the strides of a gradient, which are not.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, groups: Sequence[ProcessGroupTransport]) -> None:
        self._dtype, self._device, self._groups = dtype, device, groups
        self._size = max(1, BUCKET_BYTES // dtype.itemsize)
        self._buffer: Tensor | None = None
        self._pieces: list[Tensor] = []  # flat views of the gradients whose values are in the buffer
        # Gradients with their contiguous copies, if the last piece of the copy is in the buffer.
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._filled = 0

    def add(self, grad: Tensor, dtype: torch.dtype) -> None:
        """Sum the gradient of a parameter of this dtype, now or in the next flush."""
        dense = grad.contiguous()
        if dtype == self._dtype and grad.numel() >= self._size:
            _all_sum_(dense, self._groups)
            if not grad.is_contiguous():
                grad.copy_(dense)
            return
        flat, at = dense.view(-1), 0
        while at < len(flat):
            piece = flat[at : at + self._size - self._filled]
            if self._buffer is None:
                self._buffer = torch.empty(self._size, dtype=self._dtype, device=self._device)
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._pieces.append(piece)
            self._filled += len(piece)
            at += len(piece)
            if at == len(flat) and not grad.is_contiguous():
                self._copies.append((grad, dense))
            if self._filled == self._size:
                self.flush()

    def flush(self) -> None:
        if self._buffer is None or not self._filled:
            return
        _all_sum_(self._buffer[: self._filled], self._groups)
        at = 0
        for piece in self._pieces:
            piece.copy_(self._buffer[at : at + len(piece)])
            at += len(piece)
        for grad, dense in self._copies:
            grad.copy_(dense)
        self._pieces, self._copies, self._filled = [], [], 0


def _all_sum_(x: Tensor, groups: Sequence[ProcessGroupTransport], options: str = "", *, compare_calls: bool = False) -> Tensor:
    for group in groups:
        group.all_reduce_sum_(x, label="cp.sum_gradients", options=options, compare_calls=compare_calls)
    return x


def _described(parameters: Sequence[Tensor]) -> str:
    """Describe parameters by their dtypes and shapes: ranks that give them in another order must not match."""
    found = [(str(p.dtype), tuple(p.shape)) for p in parameters]
    return f"{len(found)} parameters {hashlib.sha256(repr(found).encode()).hexdigest()[:8]}"


def _local(x: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, else the tensor itself. Not a copy."""
    return x.to_local().detach() if is_dtensor(x) else x.detach()
