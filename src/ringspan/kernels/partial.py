"""Partial results of attention, and the one way they are put together.

Legend: B batch, H query heads, S queries, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.caching.by_digest import cache_by_digest
from ringspan.kernels.row_states import Late, Runs, State

EMPTY_LSE = float("-inf")


class Partial(NamedTuple):
    """What some keys contribute to the output of some queries: their softmax average and the log of the sum of exponentials.

    A query that saw none of the keys has ``out = 0`` and ``lse = -inf``. Both tensors are at least float32.
    """

    out: Tensor  # (..., E)
    lse: Tensor  # (...)


def finite(lse: Tensor) -> Tensor:
    """With 0 for rows that see nothing: they have no part in any band, but kernels must not meet exp(x + inf) all the same.

    Contiguous, as memory-efficient attention wants it.
    """
    return torch.nan_to_num(lse.contiguous(), nan=torch.nan, posinf=torch.inf, neginf=0.0)


def merge(a: Partial, b: Partial) -> Partial:
    """The partial result over the keys of both. Exact when either or both are empty."""
    merged = Partial(*(x.clone(memory_format=torch.contiguous_format) for x in a))
    merge_(merged, b)
    return merged


@cache_by_digest(1, plain=True)
def fused_kernels() -> ModuleType | None:
    """Those for CUDA devices, if there is a Triton to compile them."""
    return import_module("ringspan.kernels.fused") if find_spec("triton") is not None else None


def merge_(into: Partial, other: Partial, *, old: Tensor | None = None) -> None:
    """:func:`merge`, in place. Each out may be narrower than lse, in which it is computed.

    With ``old``, that is what into's out was so far, and into's own is only written.
    """
    old = into.out if old is None else old
    if into.out.is_cuda and into.lse.ndim == 3 and (fused := fused_kernels()) is not None:
        fused.merge_(into.out, into.lse, other.out, other.lse, old)
        return
    # b's share of the sum is e^b / (e^a + e^b) = sigmoid(b - a): 1 where a is empty, 0 where b is. Where both are it is
    # nobody's, and -inf + inf must not make it nan. lerp is exact at both ends.
    share = torch.sigmoid(other.lse - into.lse).masked_fill_(other.lse == EMPTY_LSE, 0.0)
    dtype = into.lse.dtype
    into.out.copy_(torch.lerp(old.to(dtype), other.out.to(dtype), share.unsqueeze(-1)))
    into.lse.copy_(torch.logaddexp(into.lse, other.lse))


class Accumulator:
    """The result of the queries of a slot while its parts come in. Rows first, so that rows can travel as they lie.

    The first part of a row is copied, only later ones are merged. With ``keeps=True`` a first part that has all rows and is
    narrower than the sums is not even copied: it stays as the kernel wrote it. A second one waits then, since it is often the
    last: in the end it is merged right into the first. Only what has three parts or more is ever made wide.
    """

    def __init__(self, shape_SBHE: Sequence[int], *, like: Tensor, keeps: bool = False) -> None:
        self.shape, self.like, self._keeps = tuple(shape_SBHE), like, keeps
        self._runs, self._late = Runs(self.shape[0]), Late()
        self._kept: Tensor | None = None
        self._wide: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, start: int, stop: int, part: Partial, *, heads: tuple[int, int] | None = None) -> None:
        """Take in a part for the rows from start to stop, and for some heads or all.

        Its tensors are (B, H, rows, E) and (B, H, rows).
        """
        theirs = Partial(part.out.permute(2, 0, 1, 3), part.lse.permute(2, 0, 1))
        if heads is not None:
            mine = Partial(*(x[:, :, slice(*heads)] for x in self.wide(start, stop)))
            merge_(mine, theirs)
            return
        narrow = theirs.out.dtype != self.like.dtype
        for a, b, state in self._runs.of(start, stop):
            new = theirs if (a, b) == (start, stop) else Partial(*(x[a - start : b - start] for x in theirs))
            if state == State.FRESH and self._keeps and narrow and b - a == self.shape[0]:
                self._kept, self._lse = new
                self._runs.set(a, b, State.KEPT)
            elif state == State.KEPT and narrow:
                self._late.put(a, b, *new)
                self._runs.set(a, b, State.LATE)
            elif state == State.FRESH:
                mine = self._rows(a, b)
                mine.out.copy_(new.out)
                mine.lse.copy_(new.lse)
                self._runs.set(a, b, State.WIDE)
            elif state == State.KEPT:
                merge_(self._rows(a, b), new, old=self._kept[a:b])  # type: ignore[index]
                self._leave(a, b, State.WIDE)
            else:
                merge_(self.wide(a, b), new)

    def wide(self, start: int, stop: int) -> Partial:
        """These rows, wide, those that nothing came for being empty. Views, (rows, B, H, E) and (rows, B, H)."""
        for a, b, state in self._runs.of(start, stop):
            mine = self._rows(a, b)
            if state == State.FRESH:
                mine.out.zero_()
                mine.lse.fill_(EMPTY_LSE)
            elif state == State.KEPT and self._kept is not None:
                mine.out.copy_(self._kept[a:b])
            elif state == State.LATE and self._kept is not None:
                for c, d, late in self._late.take(a, b):
                    merge_(self._rows(c, d), Partial(*late), old=self._kept[c:d])
        self._leave(start, stop, State.WIDE)
        return self._rows(start, stop)

    def clear(self, start: int, stop: int) -> None:
        """Forget what these rows have seen: other queries have moved in."""
        self._late.take(start, stop)
        self._leave(start, stop, State.FRESH)

    def finish(self) -> Partial:
        """All rows, those that nothing came for being empty.

        Out (S, B, H, E) is wide or as the kernel wrote it, lse is (S, B, H).
        """
        rows = self.shape[0]
        if self._kept is None or self._lse is None:
            return self.wide(0, rows)
        for a, b, late in self._late.take(0, rows):
            merge_(Partial(self._kept[a:b], self._lse[a:b]), Partial(*late))
            self._runs.set(a, b, State.KEPT)
        for a, b, state in self._runs.of(0, rows):
            if state != State.KEPT:
                self._kept[a:b] = self.wide(a, b).out
        return Partial(self._kept, self._lse)

    def _leave(self, start: int, stop: int, state: State) -> None:
        """These rows are no longer where the kernel wrote them. What was kept goes with the last that is."""
        self._runs.set(start, stop, state)
        if not self._runs.has(State.KEPT, State.LATE):
            self._kept = None

    def _rows(self, start: int, stop: int) -> Partial:
        if self._wide is None:
            self._wide = self.like.new_empty(self.shape)
        if self._lse is None:
            self._lse = self.like.new_empty(self.shape[:3])
        return Partial(self._wide[start:stop], self._lse[start:stop])
