"""The work of the rows of a mask, and how many keys are visible across a cut between two rows."""

from __future__ import annotations

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts.layout import Ints
from ringspan.masks import Mask
from ringspan.masks import table as tables


class WorkProfile:
    """The work and the visible keys at given tokens. Each token costs a binary search among the bands.

    >>> from ringspan import documents
    >>> profile = WorkProfile(documents([3, 2]))
    >>> tokens = np.arange(6)
    >>> profile.work_before(tokens).tolist()
    [0, 1, 3, 6, 7, 9]
    >>> profile.seen_across(tokens).tolist()
    [0, 1, 2, 0, 1, 0]
    """

    def __init__(self, mask: Mask) -> None:
        self._table = mask.table
        self._one_sequence = mask.lengths[0] == mask.lengths[1]
        self._corner, self._before, self._seen, self._slope = _corners(mask)
        q0, q1, k0, k1, _, _ = self._table.T
        opens, closes = np.argsort(q0, kind="stable"), np.argsort(q1, kind="stable")
        one_band = bool((q1[opens][:-1] <= q0[opens][1:]).all())
        # The columns of the bands in the order of their rows, if no row is in two bands.
        self._bands_of_rows = tuple(column[opens] for column in self._table.T[1:]) if one_band else None
        self._open, self._lowest_from = q0[opens], _accumulate(np.minimum, k0[opens][::-1])[::-1]
        self._close, self._highest_until = q1[closes], _accumulate(np.maximum, k1[closes])

    def work_before(self, token: Ints) -> Ints:
        """Return the area of all rows before a token."""
        i = self._corner.searchsorted(token, side="right") - 1
        d = token - self._corner[i]
        return self._before[i] + self._seen[i] * d + self._slope[i] * (d * (d - 1) // 2)

    def seen_across(self, token: Ints) -> Ints:
        """Return how many keys lie between a cut before this token and the furthest keys visible across it, on both
        sides.

        0 if queries and keys are of different sequences.
        """
        if not self._one_sequence or not len(self._table):
            return np.zeros_like(token)
        if self._bands_of_rows is not None:
            return self._seen_across_one_band(token)
        q0, q1, k0, k1, lo, hi = self._table.T
        # first the bands that lie on one side of the cut, then those that it goes through
        later = self._open.searchsorted(token)
        lowest = np.where(later < len(q0), self._lowest_from[np.minimum(later, len(q0) - 1)], token)
        earlier = self._close.searchsorted(token, side="right")
        highest = np.where(earlier > 0, self._highest_until[np.maximum(earlier - 1, 0)], token)
        rows = np.concatenate([token, token - 1])  # the first row after the cut, then the last before it
        i, j = tables.overlapping(rows, rows + 1, q0, q1)
        behind, before = slice(None, split := i.searchsorted(len(token))), slice(split, None)
        np.minimum.at(lowest, i[behind], np.maximum(k0[j[behind]], rows[i[behind]] + lo[j[behind]]))
        np.maximum.at(highest, i[before] - len(token), np.minimum(k1[j[before]], rows[i[before]] + 1 + hi[j[before]]))
        return np.maximum(token - lowest, 0) + np.maximum(highest - token, 0)

    def _seen_across_one_band(self, token: Ints) -> Ints:
        """Do :meth:`seen_across` for a mask in which no row is in two bands, such as documents.

        The bands are in the order of their rows. A cut goes through the last band that begins before it, unless that
        band ends there.
        """
        assert self._bands_of_rows is not None
        q1, k0, k1, lo, hi = self._bands_of_rows
        count = len(q1)
        later = self._open.searchsorted(token)  # the first band that begins at the cut or after it
        band = np.maximum(later - 1, 0)
        through = (later > 0) & (token < q1[band])
        earlier = later - through  # the number of bands that end at the cut or before it
        lowest = np.where(later < count, self._lowest_from[np.minimum(later, count - 1)], token)
        highest = np.where(earlier > 0, self._highest_until[np.maximum(earlier - 1, 0)], token)
        lowest = np.where(through, np.minimum(lowest, np.maximum(k0[band], token + lo[band])), lowest)
        highest = np.where(
            (later > 0) & (token <= q1[band]), np.maximum(highest, np.minimum(k1[band], token + hi[band])), highest
        )
        return np.maximum(token - lowest, 0) + np.maximum(highest - token, 0)


@cache_by_digest(8)
def work_profile(mask: Mask) -> WorkProfile:
    return WorkProfile(mask)


def _corners(mask: Mask) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the number of keys per row, as a piecewise linear function.

    Returns its corners, and at each corner the area of the rows before it, the keys of its row, and the slope up to the
    next corner. Row q of a tight band sees ``min(k1, q + hi + 1) - max(k0, q + lo)`` keys. A band begins and ends with
    a jump, and its slope changes where the other argument becomes the minimum or the maximum.
    """
    q0, q1, k0, k1, lo, hi = mask.table.T

    def seen(q: Ints) -> Ints:
        return np.minimum(k1, q + hi + 1) - np.maximum(k0, q + lo)

    fills, leaves = np.clip(k1 - hi - 1, q0, q1), np.clip(k0 - lo, q0, q1)
    none, one = np.zeros_like(q0), np.ones_like(q0)
    # one key more per row until the band reaches k1, one key less per row after it leaves k0
    changes = [(q0, seen(q0), one), (fills, none, -one), (leaves, none, -one), (q1, -seen(q1), one)]
    at, jump, bend = (np.concatenate(column) for column in zip(*changes, strict=True))
    at, jump, bend = (np.append(column, 0) for column in (at, jump, bend))  # the first corner is token 0
    order = at.argsort()
    at = at[order]
    first = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
    corner, jumps, bends = at[first], np.add.reduceat(jump[order], first), np.add.reduceat(bend[order], first)
    gap = np.append(np.diff(corner), 0)
    slope = np.cumsum(bends)
    rise = slope * gap
    first = np.cumsum(jumps) + np.cumsum(rise) - rise
    work = first * gap + slope * (gap * (gap - 1) // 2)
    return corner, np.cumsum(work) - work, first, slope


def _accumulate(extreme: np.ufunc, values: Ints) -> Ints:
    return np.asarray(extreme.accumulate(values)) if len(values) else values
