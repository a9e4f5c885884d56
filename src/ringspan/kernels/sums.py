"""Gradients of the rows of a slot while they come in, added up in at least float32.

Legend: S rows, B batch, H heads, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringspan.kernels.partial import fused_kernels
from ringspan.kernels.row_states import Late, Runs, State


class Sum:
    """One or more gradients side by side (of keys and of values), rows first, so that rows can travel as they lie.

    The first part of a row is copied, only later ones are added. With ``keeps=True`` a first part that has all rows and is
    narrower than the sums is not even copied: it stays as the kernel wrote it. A second one waits then, since it is often the
    last: in the end it is added right to the first. Only what has three parts or more is ever made wide.
    """

    def __init__(self, shape_SBH: Sequence[int], widths: Sequence[int], *, like: Tensor, keeps: bool = False) -> None:
        self.shape, self._widths, self.like, self._keeps = (*shape_SBH, sum(widths)), widths, like, keeps
        self._runs, self._late = Runs(self.shape[0]), Late()
        self._kept: tuple[Tensor, ...] = ()
        self._wide: Tensor | None = None

    def add(self, start: int, stop: int, *parts_SBHD: Tensor) -> None:
        """Add to the rows from start to stop: one tensor for all columns, or one for each gradient."""
        narrow = parts_SBHD[0].dtype != self.like.dtype
        for a, b, state in self._runs.of(start, stop):
            new = parts_SBHD if (a, b) == (start, stop) else tuple(x[a - start : b - start] for x in parts_SBHD)
            if state == State.FRESH and self._keeps and narrow and b - a == self.shape[0]:
                self._kept = new
                self._runs.set(a, b, State.KEPT)
            elif state == State.KEPT and narrow and len(new) == len(self._kept):
                self._late.put(a, b, *new)
                self._runs.set(a, b, State.LATE)
            elif state == State.FRESH:
                self._put(a, b, new)
                self._runs.set(a, b, State.WIDE)
            else:
                self.wide(a, b)
                self._add(a, b, new)

    def wide(self, start: int, stop: int) -> Tensor:
        """These rows, wide, those that nothing came for being zero. A view, (rows, B, H, all widths)."""
        for a, b, state in self._runs.of(start, stop):
            if state == State.FRESH:
                self._buffer()[a:b] = 0
            elif state != State.WIDE:
                self._put(a, b, [kept[a:b] for kept in self._kept])
                for c, d, late in self._late.take(a, b):
                    self._add(c, d, late)
        self._leave(start, stop, State.WIDE)
        return self._buffer()[start:stop]

    def clear(self, start: int, stop: int) -> None:
        """Forget what came for these rows: others have moved in."""
        self._late.take(start, stop)
        self._leave(start, stop, State.FRESH)

    def finish(self) -> tuple[Tensor, ...]:
        """Each gradient of all rows, wide or as the kernel wrote it."""
        rows = self.shape[0]
        if len(self._kept) != len(self._widths):
            return self.wide(0, rows).split(list(self._widths), dim=-1)
        for a, b, late in self._late.take(0, rows):
            for kept, theirs in zip(self._kept, late, strict=True):
                kept[a:b].add_(theirs)  # computed in float32, and rounded once
            self._runs.set(a, b, State.KEPT)
        for a, b, state in self._runs.of(0, rows):
            if state != State.KEPT:
                self.wide(a, b)
                for kept, mine in zip(self._kept, self._columns(a, b, self._kept), strict=True):
                    kept[a:b] = mine
        return self._kept

    def _leave(self, start: int, stop: int, state: State) -> None:
        """These rows are no longer where the kernel wrote them. What was kept goes with the last that is."""
        self._runs.set(start, stop, state)
        if not self._runs.has(State.KEPT, State.LATE):
            self._kept = ()

    def _put(self, start: int, stop: int, parts: Sequence[Tensor]) -> None:
        if not self._lay(start, stop, parts, add=False):
            for mine, theirs in zip(self._columns(start, stop, parts), parts, strict=True):
                mine.copy_(theirs)

    def _add(self, start: int, stop: int, parts: Sequence[Tensor]) -> None:
        if not self._lay(start, stop, parts, add=True):
            for mine, theirs in zip(self._columns(start, stop, parts), parts, strict=True):
                mine.add_(theirs)

    def _lay(self, start: int, stop: int, parts: Sequence[Tensor], *, add: bool) -> bool:
        """Two gradients in one launch, where there is a kernel for that."""
        fused = fused_kernels() if len(parts) == 2 and parts[0].is_cuda else None
        if fused is not None:
            fused.lay_(self._buffer()[start:stop], *parts, add=add)
        return fused is not None

    def _columns(self, start: int, stop: int, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Where the columns of these parts lie in these rows."""
        rows = self._buffer()[start:stop]
        return [rows] if len(parts) == 1 else rows.split([x.shape[-1] for x in parts], dim=-1)

    def _buffer(self) -> Tensor:
        if self._wide is None:
            self._wide = self.like.new_empty(self.shape)
        return self._wide
