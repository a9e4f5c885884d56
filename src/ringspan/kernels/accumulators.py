"""Accumulators: combine the parts of a result, row by row, as kernels compute them.

A query attends to the keys of several ranks, one after the other. Its output is computed in as many parts, and so are
the gradients of queries and of keys. Most rows have one part or two, so these must be cheap. Each row is in one of four
states::

                   narrow part               narrow part                any part
                   of all rows
            EMPTY ------------> KEPT -------------------> WAITING ---------------> WIDE
              |                   |                                                 ^
              |                   +---- wide part: combined with the kept one ------+
              +---- any other part: copied -----------------------------------------+

    EMPTY     no part yet
    KEPT      one part, still in the tensor that the kernel wrote: no copy is made
    WAITING   two parts: one kept, one not yet combined with it
    WIDE      the combination so far, in a buffer of at least float32

A part is *narrow* if its dtype is narrower than that of the buffer: a kernel that computes in bfloat16 writes bfloat16.
Only an accumulator with ``keeps=True`` has the states KEPT and WAITING. ``clear`` makes rows EMPTY again. ``finish``
combines each waiting part with its kept one, in place: computed in float32, rounded once. So a row of one part costs no
pass over memory, and a row of two parts costs one. A row of more parts costs about one pass for each, and one more to
copy it back if other rows are still kept.

There are two ways to combine parts: :class:`OutputAccumulator` merges outputs by their lse,
:class:`GradientAccumulator` adds.

Legend: rows first everywhere. S rows, B batch, H heads, E value dim, D width of a gradient, F = sum of all widths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from ringspan.kernels.partial import EMPTY_LSE, Partial, merge_, triton_kernels
from ringspan.kernels.row_states import RowState, RowStates, WaitingParts

Tensors = tuple[Tensor, ...]


class RowAccumulator(ABC):
    """The state machine. Subclasses say how parts are written, combined and read.

    A part, the kept tensors and the wide buffers are tuples of tensors, rows first. ``like`` gives the dtype and device
    of the wide buffers, and ``shape`` (S, B, H, width) is that of the first of them.
    """

    def __init__(self, shape: Sequence[int], *, like: Tensor, keeps: bool) -> None:
        self.shape, self.like, self._keeps = tuple(shape), like, keeps
        self._states, self._waiting = RowStates(self.shape[0]), WaitingParts()
        self._kept: Tensors | None = None
        self._wide: Tensors | None = None

    def clear(self, start: int, stop: int) -> None:
        """Forget the parts of the rows ``start:stop``."""
        self._waiting.pop(start, stop)
        self._move(start, stop, RowState.EMPTY)

    def _add(self, start: int, stop: int, part: Tensors, *, is_narrow: bool) -> None:
        for a, b, state in self._states.between(start, stop):
            new = part if (a, b) == (start, stop) else _rows(part, a - start, b - start)
            if state == RowState.EMPTY and self._keeps and is_narrow and b - a == self.shape[0]:
                self._kept, self._wide = new, None
                self._states.set(a, b, RowState.KEPT)
            elif state == RowState.KEPT and is_narrow:
                self._waiting.put(a, b, new)
                self._states.set(a, b, RowState.WAITING)
            elif state == RowState.EMPTY:
                self._copy_(self._wide_rows(a, b), new)
                self._states.set(a, b, RowState.WIDE)
            elif state == RowState.KEPT:
                self._combine_(self._wide_rows(a, b), new, old=self._kept_rows(a, b))
                self._move(a, b, RowState.WIDE)
            else:
                wide = self._widen(a, b)
                self._combine_(wide, new, old=wide)

    def _widen(self, start: int, stop: int) -> Tensors:
        """Make the rows ``start:stop`` WIDE, and return them."""
        wide = self._wide_rows(start, stop)  # first: if there is no memory for it, nothing has changed
        runs = self._states.between(start, stop)
        if len(runs) == 1 and runs[0][2] == RowState.WIDE:
            return wide
        for a, b, state in runs:
            if state == RowState.EMPTY:
                self._fill_(self._wide_rows(a, b))
            elif state == RowState.KEPT:
                self._copy_(self._wide_rows(a, b), self._kept_rows(a, b))
            elif state == RowState.WAITING:
                for c, d, part in self._waiting.pop(a, b):
                    self._combine_(self._wide_rows(c, d), part, old=self._kept_rows(c, d))
        self._move(start, stop, RowState.WIDE)
        return wide

    def _finish(self) -> Tensors:
        """All rows: in the kept tensors if any row is still there, else in the wide ones."""
        rows = self.shape[0]
        if self._kept is None:
            return self._widen(0, rows)
        for a, b, part in self._waiting.pop(0, rows):
            kept = self._kept_rows(a, b)
            self._combine_(kept, part, old=kept)
            self._states.set(a, b, RowState.KEPT)
        for a, b, state in self._states.between(0, rows):
            if state != RowState.KEPT:
                self._copy_(self._kept_rows(a, b), self._widen(a, b))
        return self._kept

    def _move(self, start: int, stop: int, state: RowState) -> None:
        """Set the state of rows that may have been kept. The kept tensors are freed when no row is left in them."""
        self._states.set(start, stop, state)
        if self._kept is not None and not self._states.has(RowState.KEPT, RowState.WAITING):
            self._kept = None

    def _kept_rows(self, start: int, stop: int) -> Tensors:
        assert self._kept is not None
        return self._kept if stop - start == self.shape[0] else _rows(self._kept, start, stop)

    def _wide_rows(self, start: int, stop: int) -> Tensors:
        if self._wide is None:
            self._wide = self._new_wide()
        return self._wide if stop - start == self.shape[0] else _rows(self._wide, start, stop)

    @abstractmethod
    def _new_wide(self) -> Tensors:
        """Allocate the wide buffers."""

    @abstractmethod
    def _fill_(self, into: Tensors) -> None:
        """Write what a row without parts holds."""

    @abstractmethod
    def _copy_(self, into: Tensors, part: Tensors) -> None:
        """Write a part, whatever the dtypes."""

    @abstractmethod
    def _combine_(self, into: Tensors, part: Tensors, *, old: Tensors) -> None:
        """Write the combination of ``old`` and a part. ``old`` may be ``into`` itself."""


class OutputAccumulator(RowAccumulator):
    """Outputs of attention with their lse, merged by :func:`ringspan.kernels.partial.merge_`.

    lse is never narrow: once a part is kept, its lse is also that of the wide rows.
    """

    def __init__(self, shape_SBHE: Sequence[int], *, like: Tensor, keeps: bool = False) -> None:
        super().__init__(shape_SBHE, like=like, keeps=keeps)

    def add(self, start: int, stop: int, part: Partial, *, heads: tuple[int, int] | None = None) -> None:
        """Merge a part into the rows ``start:stop``, of some heads or of all.

        The part is heads first, as kernels write it: out (B, H, rows, E) and lse (B, H, rows).
        """
        part = Partial(part.out.permute(2, 0, 1, 3), part.lse.permute(2, 0, 1))
        if heads is None:
            self._add(start, stop, part, is_narrow=part.out.dtype != self.like.dtype)
        else:
            merge_(Partial(*(x[:, :, slice(*heads)] for x in self.wide(start, stop))), part)

    def wide(self, start: int, stop: int) -> Partial:
        """The rows ``start:stop`` in the wide dtype: views (rows, B, H, E) and (rows, B, H)."""
        return Partial(*self._widen(start, stop))

    def finish(self) -> Partial:
        """All rows: out (S, B, H, E), in the wide dtype or in the kernel's, and lse (S, B, H).

        A row without parts has out 0 and lse -inf.
        """
        return Partial(*self._finish())

    def _new_wide(self) -> Tensors:
        lse = self.like.new_empty(self.shape[:3]) if self._kept is None else self._kept[1]
        return self.like.new_empty(self.shape), lse

    def _fill_(self, into: Tensors) -> None:
        out, lse = into
        out.zero_()
        lse.fill_(EMPTY_LSE)

    def _copy_(self, into: Tensors, part: Tensors) -> None:
        for mine, theirs in zip(into, part, strict=True):
            mine.copy_(theirs)  # returns at once where both are the same memory, as lse often is

    def _combine_(self, into: Tensors, part: Tensors, *, old: Tensors) -> None:
        merge_(Partial(*into), Partial(*part), old=old[0])


class GradientAccumulator(RowAccumulator):
    """Sums of gradients: of one tensor, or of several (keys and values) that are side by side in the wide buffer."""

    def __init__(self, shape_SBH: Sequence[int], widths: Sequence[int], *, like: Tensor, keeps: bool = False) -> None:
        super().__init__((*shape_SBH, sum(widths)), like=like, keeps=keeps)
        self._widths = list(widths)

    def add(self, start: int, stop: int, *part_SBHD: Tensor) -> None:
        """Add a part to the rows ``start:stop``: one tensor for each gradient, or one with all of them side by side."""
        is_narrow = part_SBHD[0].dtype != self.like.dtype and len(part_SBHD) == len(self._widths)
        self._add(start, stop, part_SBHD, is_narrow=is_narrow)

    def wide(self, start: int, stop: int) -> Tensor:
        """The rows ``start:stop`` in the wide dtype: a view (rows, B, H, F). Rows without parts are zero."""
        (rows,) = self._widen(start, stop)
        return rows

    def finish(self) -> Tensors:
        """Each gradient of all rows, in the wide dtype or in the kernel's. Rows without parts are zero."""
        grads = self._finish()
        return grads if len(grads) == len(self._widths) else grads[0].split(self._widths, dim=-1)

    def _new_wide(self) -> Tensors:
        return (self.like.new_empty(self.shape),)

    def _fill_(self, into: Tensors) -> None:
        into[0].zero_()

    def _copy_(self, into: Tensors, part: Tensors) -> None:
        if not _write_fused(into, part, add=False):
            for mine, theirs in _pairs(into, part):
                mine.copy_(theirs)

    def _combine_(self, into: Tensors, part: Tensors, *, old: Tensors) -> None:
        if old is not into:
            self._copy_(into, old)
        if not _write_fused(into, part, add=True):
            for mine, theirs in _pairs(into, part):
                mine.add_(theirs)


def _write_fused(into: Tensors, part: Tensors, *, add: bool) -> bool:
    """Write two gradients side by side in one launch, where there is a kernel for that."""
    fused = triton_kernels() if len(into) == 1 and len(part) == 2 and part[0].is_cuda else None
    if fused is not None:
        fused.write_side_by_side_(*into, *part, add=add)
    return fused is not None


def _pairs(a: Tensors, b: Tensors) -> Iterable[tuple[Tensor, Tensor]]:
    """Each gradient of a with that of b. Either may hold all of them side by side in one tensor."""
    if len(a) < len(b):
        a = a[0].split([x.shape[-1] for x in b], dim=-1)
    elif len(b) < len(a):
        b = b[0].split([x.shape[-1] for x in a], dim=-1)
    return zip(a, b, strict=True)


def _rows(tensors: Tensors, start: int, stop: int) -> Tensors:
    return tuple([x[start:stop] for x in tensors])
