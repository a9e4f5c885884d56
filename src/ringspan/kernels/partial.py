"""Partial results of attention, and the one way they are put together.

Legend: B batch, H query heads, S queries, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

EMPTY_LSE = float("-inf")


class Partial(NamedTuple):
    """What some keys contribute to the output of some queries: their softmax average and the log of the sum of exponentials.

    A query that saw none of the keys has ``out = 0`` and ``lse = -inf``. Both tensors are at least float32.
    """

    out: Tensor  # (..., E)
    lse: Tensor  # (...)


def merge(a: Partial, b: Partial) -> Partial:
    """The partial result over the keys of both. Exact when either or both are empty."""
    merged = Partial(a.out.clone(), a.lse.clone())
    merge_(merged, b)
    return merged


def merge_(into: Partial, other: Partial) -> None:
    """:func:`merge`, in place. The other's out may be narrower than float32."""
    if into.out.is_cuda and find_spec("triton") is not None:
        from ringspan.kernels import fused

        fused.merge_(into.out, into.lse, other.out, other.lse)
        return
    # b's share of the sum is e^b / (e^a + e^b) = sigmoid(b - a): 1 where a is empty, 0 where b is. Where both are it is
    # nobody's, and -inf + inf must not make it nan. lerp is exact at both ends.
    share = torch.sigmoid(other.lse - into.lse).masked_fill_(other.lse == EMPTY_LSE, 0.0)
    into.out.lerp_(other.out.to(into.out.dtype), share.unsqueeze(-1))
    into.lse.copy_(torch.logaddexp(into.lse, other.lse))


class Accumulator:
    """The result of the queries of a slot while its parts come in. Rows first, so that rows can travel as they lie.

    It remembers which rows have been touched: the first part of a row is copied, only later ones are merged.
    """

    def __init__(self, rows: int, batch: int, heads: int, width: int, *, like: Tensor) -> None:
        self.out_SBHE = like.new_empty((rows, batch, heads, width))
        self.lse_SBH = like.new_empty((rows, batch, heads))
        self._touched: list[tuple[int, int]] = []

    def add(self, start: int, stop: int, part: Partial, *, heads: tuple[int, int] | None = None) -> None:
        """Take in a part for the rows from start to stop, and for some heads or all.

        Its tensors are (B, H, rows, E) and (B, H, rows).
        """
        out_SBHE, lse_SBH = part.out.permute(2, 0, 1, 3), part.lse.permute(2, 0, 1)
        if heads is not None:
            self._empty_fresh(start, stop)
            mine = Partial(*(x[:, :, slice(*heads)] for x in self.rows(start, stop)))
            merge_(mine, Partial(out_SBHE, lse_SBH))
            return
        for a, b, fresh in self._pieces(start, stop):
            mine = self.rows(a, b)
            theirs = Partial(out_SBHE[a - start : b - start], lse_SBH[a - start : b - start])
            if fresh:
                mine.out.copy_(theirs.out)
                mine.lse.copy_(theirs.lse)
            else:
                merge_(mine, theirs)
        self._touched = _with(self._touched, start, stop)

    def rows(self, start: int, stop: int) -> Partial:
        return Partial(self.out_SBHE[start:stop], self.lse_SBH[start:stop])

    def clear(self, start: int, stop: int) -> None:
        """Forget what these rows have seen: other queries have moved in."""
        kept = []
        for a, b in self._touched:
            kept += [(x, y) for x, y in ((a, min(b, start)), (max(a, stop), b)) if x < y]
        self._touched = kept

    def finish(self) -> Partial:
        """All rows, those that nothing came for being empty. Views, (S, B, H, E) and (S, B, H)."""
        self._empty_fresh(0, len(self.lse_SBH))
        return Partial(self.out_SBHE, self.lse_SBH)

    def _empty_fresh(self, start: int, stop: int) -> None:
        for a, b, fresh in list(self._pieces(start, stop)):
            if fresh:
                self.out_SBHE[a:b] = 0
                self.lse_SBH[a:b] = EMPTY_LSE
        self._touched = _with(self._touched, start, stop)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """The rows in runs that are all fresh or all touched."""
        at = start
        for a, b in self._touched:
            if b <= at or a >= stop:
                continue
            if at < a:
                yield at, a, True
                at = a
            yield at, min(b, stop), False
            at = min(b, stop)
        if at < stop:
            yield at, stop, True


def _with(touched: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    apart = [(a, b) for a, b in touched if b < start or stop < a]
    joined = [(a, b) for a, b in touched if not (b < start or stop < a)]
    whole = (min([start, *(a for a, _ in joined)]), max([stop, *(b for _, b in joined)]))
    return sorted([*apart, whole])
