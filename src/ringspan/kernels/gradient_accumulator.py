"""Sums of gradients, row by row: the accumulator of :mod:`ringspan.kernels.accumulators` that adds.

On CUDA devices the messages of a step are added together (:meth:`GradientAccumulator.add_together`): each is read once,
and the sum is written once. Rows are cut where another set of messages begins::

    message of rank 1    [0,         4096)
    message of rank 2    [0,                   8192)        two launches: rows [0, 4096) have three terms,
    message of rank 3    [0,         4096)                  and rows [4096, 8192) have one

Legend: rows first everywhere. S rows, B batch, H heads, D width of a gradient, F = sum of all widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.accumulators import RowAccumulator, RowState, Tensors, slice_rows
from ringspan.kernels.partial import triton_module
from ringspan.kernels.rows import copy_rows_, sums_kernel_for


class ReceivedRows(NamedTuple):
    """Gradients of the rows ``start:stop`` from another rank: (rows, B, H, F), in any dtype."""

    start: int
    stop: int
    rows_SBHF: Tensor


class GradientAccumulator(RowAccumulator):
    """Sums of gradients: of one tensor, or of several (keys and values) that are side by side in the buffer.

    A partial result has one tensor (rows, B, H, D) for each gradient, or one tensor (rows, B, H, F) with all of them
    side by side. ``accumulated`` returns one such tensor (rows, B, H, F). Rows without gradients are zero.
    """

    def __init__(
        self,
        shape_SBH: Sequence[int],
        widths: Sequence[int],
        *,
        like: Tensor,
        reuse_kernel_output: bool = False,
        buffer_dtype: torch.dtype | None = None,
    ) -> None:
        shape = (*shape_SBH, sum(widths))
        super().__init__(shape, like=like, reuse_kernel_output=reuse_kernel_output, buffer_dtype=buffer_dtype)
        self._widths = list(widths)

    def add_together(self, messages: Sequence[ReceivedRows], *, is_last: bool = False) -> None:
        """Add messages, of which several may have the same rows, to the gradients of their rows so far.

        The result is that of adding one after the other. ``is_last`` says that nothing is added to this accumulator
        later. Borrowed rows then stay in the borrowed tensors, and their sum is rounded once.
        """
        for start, stop, _ in messages:
            if any(part.overlaps(start, stop) for part in self._head_parts):
                self.accumulated(start, stop)
        for first, last in pairwise(sorted({edge for start, stop, _ in messages for edge in (start, stop)})):
            here = [rows[first - a : last - a] for a, b, rows in messages if a <= first and last <= b]
            for low, high, state in self._states.between(first, last) if here else ():
                if state != RowState.PENDING:
                    self._add_rows(low, high, state, [(x[low - first : high - first],) for x in here], is_last)
                    continue
                for begin, end, partial in self._pending.pop(low, high):
                    terms = [partial, *[(x[begin - first : end - first],) for x in here]]
                    self._add_rows(begin, end, state, terms, is_last)

    def finish(self) -> Tensors:
        """Return each gradient of all rows, in the accumulation dtype or in the kernel's."""
        grads = super().finish()
        return grads if len(grads) == len(self._widths) else grads[0].split(self._widths, dim=-1)

    def _add_rows(self, start: int, stop: int, state: RowState, terms: list[Tensors], is_last: bool) -> None:
        """Add terms to rows in one state, none of which has a part of its heads only."""
        is_borrowed = state in (RowState.BORROWED, RowState.PENDING)
        old = self._borrowed_rows(start, stop) if is_borrowed else self._buffer_rows(start, stop)
        into = self._buffer_rows(start, stop) if is_borrowed and not is_last else old
        write_sum_(into, terms if state == RowState.EMPTY else [old, *terms], self.like.dtype)
        self._set_state(start, stop, RowState.BORROWED if is_borrowed and is_last else RowState.ACCUMULATED)

    def _adopt(self, partial: Tensors) -> bool:
        if len(partial) > 1:
            return False
        self._buffers = partial
        return True

    def _buffer_rows(self, start: int, stop: int) -> Tensors:
        if self._buffers is None:
            self._buffers = (self.like.new_empty(self.shape, dtype=self._buffer_dtype),)
        return self._buffers if stop - start == self.shape[0] else slice_rows(self._buffers, start, stop)

    def _fill_neutral_(self, into: Tensors) -> None:
        into[0].zero_()

    def _copy_(self, into: Tensors, partial: Tensors) -> None:
        if not _try_write_fused(into, partial, add=False):
            for destination, source in zip(*_as_many(into, partial), strict=True):
                copy_rows_(destination, source) if destination.is_cuda else destination.copy_(source)

    def _combine_(self, into: Tensors, partial: Tensors, *, old: Tensors) -> None:
        if old is not into or not _try_write_fused(into, partial, add=True):
            write_sum_(into, (old, partial), self.like.dtype)


def write_sum_(into: Tensors, terms: Sequence[Tensors], dtype: torch.dtype) -> None:
    """Write the sum of the terms, added in ``dtype`` and rounded once. The first term may be ``into`` itself.

    Gradients may be several tensors, or one tensor with all of them side by side.
    """
    in_place = terms[0] is into
    for gradient, *parts in zip(*_as_many(into, *terms), strict=True):
        if (fused := sums_kernel_for(gradient)) is not None:
            fused.write_sum_(gradient, parts, dtype)
            continue
        total = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
        if not in_place or total is not gradient:
            total.copy_(parts[0])
        for x in parts[1:]:
            total.add_(x)
        if total is not gradient:
            gradient.copy_(total)


def _try_write_fused(into: Tensors, partial: Tensors, *, add: bool) -> bool:
    """Write two gradients side by side in one launch. Returns False, and writes nothing, if no kernel can do that."""
    fused = triton_module("fused") if len(into) == 1 and len(partial) == 2 and partial[0].is_cuda else None
    if fused is not None:
        fused.write_side_by_side_(*into, *partial, add=add)
    return fused is not None


def _as_many(*groups: Tensors) -> list[Tensors]:
    """Split tensors that have all gradients side by side, unless all groups have them so."""
    most, widths, split = max(groups, key=len), [], []
    for x in most:
        widths.append(x.shape[-1])
    for tensors in groups:
        split.append(tensors if len(tensors) == len(most) else tensors[0].split(widths, dim=-1))
    return split
