"""Accumulators combine the partial results of attention, row by row, as kernels compute them.

A query attends to the keys of several ranks, one rank after the other. Each of these computations gives a partial
result: an output with its lse, or gradients. An accumulator combines the partial results of each row. Most rows have
one partial result or two, so these cases must be cheap. Each row is in one of four states::

                 low-precision partial         low-precision
                 result of all rows            partial result              any partial result
          EMPTY ----------------------> BORROWED ------------> PENDING -----------------------> ACCUMULATED
            |                              |                                                        ^
            |                              +-- partial result in the accumulation dtype: combined --+
            +-- any other partial result: copied, or adopted as the buffer -------------------------+

    EMPTY        no partial result yet
    BORROWED     one partial result, still in the tensor that the kernel returned: no copy is made
    PENDING      two partial results: one borrowed, the second not yet combined with it
    ACCUMULATED  the combination so far, in a buffer of the accumulation dtype (at least float32)

Five operations are not in the drawing. ``clear`` makes rows EMPTY again, from any state. ``accumulated`` makes rows
ACCUMULATED, from any state. They exist because partial results move between ranks: ``accumulated`` gives the rows of a
message, in the accumulation dtype; ``clear`` frees a slot for the rows of another rank. ``add_to_heads`` receives the
result of some heads from the rank that computed them. The first result of some heads of EMPTY rows is copied into the
buffer, and these rows stay EMPTY; the accumulator notes which heads they have. When such rows become ACCUMULATED, only
the other heads are filled. So rows whose heads come from several ranks cost one copy. ``complete_rows`` gives rows to
which nothing is added later, as ``finish`` does for all rows, but borrowed rows stay where they are. ``add_together`` is
described at the end.

A kernel that computes in bfloat16 returns bfloat16, which has lower precision than the accumulation dtype. Only an
accumulator with ``reuse_kernel_output=True`` has the states BORROWED and PENDING. ``finish`` combines each pending
partial result with the borrowed one, in place: it computes in the accumulation dtype and rounds once. A row with one
partial result costs no pass over memory if that partial result covered all rows, and one copy otherwise. A second
partial result costs one pass. A row with more costs about one pass for each, and one more to copy it back if other rows
are still borrowed.

On GPUs, ``add_together`` of the accumulator of gradients adds all messages of a step to rows in any state, and makes
them ACCUMULATED. In the last step, rows that are BORROWED or PENDING become BORROWED: the sum is rounded into the
borrowed tensor.

There are two ways to combine: :class:`OutputAccumulator` merges outputs by their lse,
:class:`ringspan.kernels.gradient_accumulator.GradientAccumulator` adds.

Legend: rows first everywhere. S rows, B batch, H heads, E value dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.partial import EMPTY_LSE, Partial, merge_
from ringspan.kernels.rows import copy_rows_

Tensors = tuple[Tensor, ...]


class RowState(IntEnum):
    """The states of the drawing above."""

    EMPTY = 0  # no partial result yet
    BORROWED = 1  # one partial result, in the tensor that the kernel returned
    PENDING = 2  # two partial results: one borrowed, one not yet combined with it
    ACCUMULATED = 3  # in the buffer of the accumulation dtype


class RowStates:
    """The state of every row, stored as runs of rows in the same state.

    >>> states = RowStates(8)
    >>> states.set(2, 5, RowState.ACCUMULATED)
    >>> [(start, stop, state.name) for start, stop, state in states.between(0, 4)]
    [(0, 2, 'EMPTY'), (2, 4, 'ACCUMULATED')]
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._runs = [(0, rows, RowState.EMPTY)] if rows else []

    def between(self, start: int, stop: int) -> list[tuple[int, int, RowState]]:
        """Return the runs of the rows ``start:stop``."""
        if len(self._runs) == 1:  # the common case
            ((first, last, state),) = self._runs
            return [(max(first, start), min(last, stop), state)] if first < stop and start < last else []
        return [
            (max(first, start), min(last, stop), state) for first, last, state in self._runs if first < stop and start < last
        ]

    def has(self, *states: RowState) -> bool:
        """Return whether any row is in one of these states."""
        return any(state in states for *_, state in self._runs)

    def set(self, start: int, stop: int, state: RowState) -> None:
        """Set the state of the rows ``start:stop``."""
        if start >= stop:
            return
        if stop - start == self._rows:  # the common case
            self._runs = [(start, stop, state)]
            return
        runs: list[tuple[int, int, RowState]] = []
        for first, last, old in self._runs:
            before = (first, min(last, start), old)
            changed = (max(first, start), min(last, stop), state)
            after = (max(first, stop), last, old)
            for low, high, new in (before, changed, after):
                if low >= high:
                    continue
                if runs and runs[-1][2] == new:
                    runs[-1] = (runs[-1][0], high, new)
                else:
                    runs.append((low, high, new))
        self._runs = runs


class PendingPartials:
    """Partial results that are not yet combined with a borrowed one, at most one for each row.

    Tensors have rows first.
    """

    def __init__(self) -> None:
        self._partials: list[tuple[int, int, Tensors]] = []

    def put(self, start: int, stop: int, partial: Tensors) -> None:
        """Keep a partial result of the rows ``start:stop``, which have none here yet."""
        self._partials.append((start, stop, partial))

    def pop(self, start: int, stop: int) -> list[tuple[int, int, Tensors]]:
        """Remove and return the partial results of the rows ``start:stop``, each as (start, stop, tensors)."""
        if not self._partials:
            return []
        popped, left = [], []
        for first, last, partial in self._partials:
            low, high = max(first, start), min(last, stop)
            if low >= high:
                left.append((first, last, partial))
                continue
            if (low, high) == (first, last):
                popped.append((first, last, partial))
                continue
            popped.append((low, high, tuple(x[low - first : high - first] for x in partial)))
            for begin, end in ((first, low), (high, last)):
                if begin < end:
                    left.append((begin, end, tuple(x[begin - first : end - first] for x in partial)))
        self._partials = left
        return popped


class HeadPart(NamedTuple):
    """The rows ``start:stop`` of the head range ``heads``."""

    start: int
    stop: int
    heads: tuple[int, int]

    def overlaps(self, start: int, stop: int, heads: tuple[int, int] | None = None) -> bool:
        """Return whether the part has one of these rows, in one of these heads."""
        has_head = heads is None or (self.heads[0] < heads[1] and heads[0] < self.heads[1])
        return has_head and self.start < stop and start < self.stop

    def cut(self, start: int, stop: int) -> list[HeadPart]:
        """Return the part without the rows ``start:stop``.

        >>> HeadPart(0, 8, (2, 4)).cut(3, 5)
        [HeadPart(start=0, stop=3, heads=(2, 4)), HeadPart(start=5, stop=8, heads=(2, 4))]
        """
        both = HeadPart(self.start, min(self.stop, start), self.heads), HeadPart(max(self.start, stop), self.stop, self.heads)
        return [part for part in both if part.start < part.stop]


class RowAccumulator(ABC):
    """The state machine. Subclasses define how partial results are written, combined and read.

    A partial result, the borrowed tensors and the buffers are tuples of tensors, rows first. ``like`` gives the
    accumulation dtype and the device of the buffers. ``shape`` (S, B, H, width) is the shape of the first buffer.
    ``buffer_dtype`` is another dtype of its elements, for complete results, of which nothing is accumulated.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        like: Tensor,
        reuse_kernel_output: bool = False,
        buffer_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape, self.like, self._reuse_kernel_output = tuple(shape), like, reuse_kernel_output
        self._buffer_dtype = buffer_dtype
        self._states, self._pending = RowStates(self.shape[0]), PendingPartials()
        self._borrowed: Tensors | None = None
        self._buffers: Tensors | None = None
        self._head_parts: list[HeadPart] = []  # of EMPTY rows

    def add(self, start: int, stop: int, *partial: Tensor, adopt: bool = False) -> None:
        """Combine a partial result, rows first, with those of the rows ``start:stop`` so far.

        ``adopt`` says that nothing else reads or writes the tensors later, so that they may become the buffers.
        """
        is_low_precision = partial[0].dtype != self.like.dtype
        if self._head_parts and any(part.overlaps(start, stop) for part in self._head_parts):
            self.accumulated(start, stop)
        for first, last, state in self._states.between(start, stop):
            new = partial if (first, last) == (start, stop) else slice_rows(partial, first - start, last - start)
            covers_all = last - first == self.shape[0]
            if state == RowState.EMPTY and self._reuse_kernel_output and is_low_precision and covers_all:
                self._borrowed, self._buffers = new, None
                self._states.set(first, last, RowState.BORROWED)
            elif state == RowState.BORROWED and is_low_precision:
                self._pending.put(first, last, new)
                self._states.set(first, last, RowState.PENDING)
            elif state == RowState.EMPTY:
                # Only on CPUs: on GPUs most results have low precision, and are borrowed.
                x, like = new[0], self.like
                can_adopt = adopt and covers_all and x.device.type == "cpu" and x.dtype == like.dtype and x.is_contiguous()
                if not (can_adopt and self._adopt(new)):
                    self._copy_(self._buffer_rows(first, last), new)
                self._states.set(first, last, RowState.ACCUMULATED)
            elif state == RowState.BORROWED:
                self._combine_(self._buffer_rows(first, last), new, old=self._borrowed_rows(first, last))
                self._set_state(first, last, RowState.ACCUMULATED)
            else:
                accumulated = self.accumulated(first, last)
                self._combine_(accumulated, new, old=accumulated)

    def add_to_heads(self, start: int, stop: int, heads: tuple[int, int], *partial: Tensor) -> None:
        """Combine a partial result of the head range ``heads`` with those of the rows ``start:stop`` so far."""
        is_first = all(state == RowState.EMPTY for *_, state in self._states.between(start, stop)) and not any(
            part.overlaps(start, stop, heads) for part in self._head_parts
        )
        rows = self._buffer_rows(start, stop) if is_first else self.accumulated(start, stop)
        of_heads = tuple([x[:, :, slice(*heads)] for x in rows])
        if is_first:
            self._copy_(of_heads, partial)
            self._head_parts.append(HeadPart(start, stop, heads))
        else:
            self._combine_(of_heads, partial, old=of_heads)

    def clear(self, start: int, stop: int) -> None:
        """Discard the partial results of the rows ``start:stop``."""
        self._pending.pop(start, stop)
        self._drop_head_parts(start, stop)
        self._set_state(start, stop, RowState.EMPTY)

    def accumulated(self, start: int, stop: int) -> Tensors:
        """Make the rows ``start:stop`` ACCUMULATED. Return them: views of the buffers, in the accumulation dtype."""
        accumulated = self._buffer_rows(start, stop)  # first: if there is no memory for it, nothing has changed
        runs = self._states.between(start, stop)
        if len(runs) == 1 and runs[0][2] == RowState.ACCUMULATED:
            return accumulated
        for first, last, state in runs:
            if state == RowState.EMPTY:
                self._fill_missing_heads_(first, last)
            elif state == RowState.BORROWED:
                self._copy_(self._buffer_rows(first, last), self._borrowed_rows(first, last))
            elif state == RowState.PENDING:
                for low, high, partial in self._pending.pop(first, last):
                    self._combine_(self._buffer_rows(low, high), partial, old=self._borrowed_rows(low, high))
        self._drop_head_parts(start, stop)
        self._set_state(start, stop, RowState.ACCUMULATED)
        return accumulated

    def complete_rows(self, start: int, stop: int) -> Tensors:
        """Return the rows ``start:stop``, to which nothing is added later: views of the borrowed tensors if all are
        there, else of the buffers, in the accumulation dtype."""
        if all(state == RowState.BORROWED for *_, state in self._states.between(start, stop)):
            return self._borrowed_rows(start, stop)
        return self.accumulated(start, stop)

    def copy_complete(self, into: Tensors) -> None:
        """Copy all rows, to which nothing is added later, rounded to the dtype of ``into``."""
        self._copy_(into, self.complete_rows(0, self.shape[0]))

    def finish(self) -> Tensors:
        """Return all rows: in the borrowed tensors if any row is still in them, else in the buffers."""
        rows = self.shape[0]
        if self._borrowed is None:
            return self.accumulated(0, rows)
        for start, stop, partial in self._pending.pop(0, rows):
            borrowed = self._borrowed_rows(start, stop)
            self._combine_(borrowed, partial, old=borrowed)
            self._states.set(start, stop, RowState.BORROWED)
        for start, stop, state in self._states.between(0, rows):
            if state != RowState.BORROWED:
                self._copy_(self._borrowed_rows(start, stop), self.accumulated(start, stop))
        return self._borrowed

    def _fill_missing_heads_(self, start: int, stop: int) -> None:
        """Write the neutral element to the heads of EMPTY rows that have no partial result."""
        parts = [part for part in self._head_parts if part.overlaps(start, stop)]
        edges = {start, stop}
        for part in parts:
            edges |= {max(part.start, start), min(part.stop, stop)}
        for first, last in pairwise(sorted(edges)):
            rows, head = self._buffer_rows(first, last), 0
            ends = (self.shape[2], self.shape[2])
            for heads in [*sorted(part.heads for part in parts if part.overlaps(first, last)), ends]:
                if head < heads[0]:
                    self._fill_neutral_(tuple([x[:, :, head : heads[0]] for x in rows]))
                head = heads[1]

    def _drop_head_parts(self, start: int, stop: int) -> None:
        """Forget which heads the rows ``start:stop`` have."""
        if self._head_parts:
            cut = [part.cut(start, stop) for part in self._head_parts]
            self._head_parts = [part for parts in cut for part in parts]

    def _set_state(self, start: int, stop: int, state: RowState) -> None:
        """Set the state of rows, and release the borrowed tensors if no row is left in them."""
        self._states.set(start, stop, state)
        if self._borrowed is not None and not self._states.has(RowState.BORROWED, RowState.PENDING):
            self._borrowed = None

    def _borrowed_rows(self, start: int, stop: int) -> Tensors:
        assert self._borrowed is not None
        return self._borrowed if stop - start == self.shape[0] else slice_rows(self._borrowed, start, stop)

    @abstractmethod
    def _buffer_rows(self, start: int, stop: int) -> Tensors:
        """Return the rows ``start:stop`` of the buffers. The first call allocates them."""

    @abstractmethod
    def _adopt(self, partial: Tensors) -> bool:
        """Use the tensors of a partial result of all rows as the buffers. Returns False if these are other tensors."""

    @abstractmethod
    def _fill_neutral_(self, into: Tensors) -> None:
        """Write the neutral element, which is the value of a row without partial results."""

    @abstractmethod
    def _copy_(self, into: Tensors, partial: Tensors) -> None:
        """Write a partial result, converted to the dtype of ``into``."""

    @abstractmethod
    def _combine_(self, into: Tensors, partial: Tensors, *, old: Tensors) -> None:
        """Write the combination of ``old`` and a partial result. ``old`` may be ``into`` itself."""


class OutputAccumulator(RowAccumulator):
    """Outputs of attention with their lse, merged by :func:`ringspan.kernels.partial.merge_`.

    A partial result is out (rows, B, H, E) and lse (rows, B, H). A row without partial results has out 0 and lse -inf.

    The lse of a partial result has the accumulation dtype. Therefore the buffers need no lse of their own while a
    partial result is borrowed: they use the lse tensor of the borrowed partial result. A row of that tensor has the lse
    of the borrowed output if the row is BORROWED or PENDING, and the lse of the buffer if the row is ACCUMULATED.

    On CPUs, whose kernels return no low precision to borrow, the lse of the buffers is float64. A rounding error
    of lse becomes a relative error of every softmax weight in the backward pass. In float32 an lse of some hundreds has
    a rounding error of about 1e-5, and every merge would add another.
    """

    def finish(self) -> Tensors:
        """Return all rows, with the lse in the accumulation dtype."""
        if self._borrowed is not None:
            return super().finish()
        out, lse = self.accumulated(0, self.shape[0])
        return out, lse.to(self.like.dtype)

    def _adopt(self, partial: Tensors) -> bool:
        out, lse = partial
        self._buffers = out, lse.double()
        return True

    def _buffer_rows(self, start: int, stop: int) -> Tensors:
        if self._buffers is None:
            dtype = torch.float64 if self.like.device.type == "cpu" else self.like.dtype
            lse = self.like.new_empty(self.shape[:3], dtype=dtype) if self._borrowed is None else self._borrowed[1]
            self._buffers = self.like.new_empty(self.shape, dtype=self._buffer_dtype), lse
        return self._buffers if stop - start == self.shape[0] else slice_rows(self._buffers, start, stop)

    def _fill_neutral_(self, into: Tensors) -> None:
        out, lse = into
        out.zero_()
        lse.fill_(EMPTY_LSE)

    def _copy_(self, into: Tensors, partial: Tensors) -> None:
        (out, lse), (new_out, new_lse) = into, partial
        copy_rows_(out, new_out) if out.is_cuda else out.copy_(new_out)
        lse.copy_(new_lse)  # returns at once if both are the same memory, as is the case for a borrowed lse

    def _combine_(self, into: Tensors, partial: Tensors, *, old: Tensors) -> None:
        # merge_ reads the old lse from into: the lse of the buffers is that of the borrowed partial result.
        merge_(Partial(*into), Partial(*partial), old=old[0])


def slice_rows(tensors: Tensors, start: int, stop: int) -> Tensors:
    return tuple([x[start:stop] for x in tensors])
