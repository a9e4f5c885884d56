"""Tables of bands: the algebra of :class:`~ringspan.masks.band.Band`, vectorised over bands.

A table is an int64 array with one band per row and the columns of ``Band``. A band has all pairs of a query q and a key
k with ``q0 <= q < q1``, ``k0 <= k < k1`` and ``lo <= k - q <= hi``. All functions are pure. They return tight bands
(see :func:`tighten`), except :func:`intersect_pairwise`. Their cost grows with the number of bands and of pairs of
bands whose rows overlap. It does not grow with the number of tokens, except for :func:`dense`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]
Ints = NDArray[np.int64]

Q0, Q1, K0, K1, LO, HI = range(6)

# The longest sequence: the area of a mask of this many queries and keys fits int64, and so do sums of such areas.
MAX_LENGTH = 2**31 - 1

EMPTY: Table = np.zeros((0, 6), dtype=np.int64)


def table(*bands: tuple[int, int, int, int, int, int]) -> Table:
    """Return a tight table of the given bands.

    >>> table((0, 4, 0, 4, -99, 0)).tolist()
    [[0, 4, 0, 4, -3, 0]]
    """
    return tighten(np.array(bands, dtype=np.int64).reshape(-1, 6))


def tighten(t: Table) -> Table:
    """Trim every band to its non-empty rows and columns, and its diagonals to its corners; drop empty bands."""
    return tighten_indexed(t)[0]


def tighten_indexed(t: Table) -> tuple[Table, Ints]:
    """Apply :func:`tighten`. Returns also which rows of ``t`` were kept."""
    q0, q1, k0, k1, lo, hi = t.T
    # A row q is not empty iff k0 <= q + hi and q + lo < k1; likewise a column.
    rq0, rq1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    rk0, rk1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    (keep,) = ((q0 < q1) & (k0 < k1) & (lo <= hi) & (rq0 < rq1) & (rk0 < rk1)).nonzero()
    rq0, rq1, rk0, rk1 = rq0[keep], rq1[keep], rk0[keep], rk1[keep]
    tight = np.empty((len(keep), 6), dtype=np.int64)
    tight[:, Q0], tight[:, Q1], tight[:, K0], tight[:, K1] = rq0, rq1, rk0, rk1
    np.maximum(lo[keep], rk0 - rq1 + 1, out=tight[:, LO])
    np.minimum(hi[keep], rk1 - 1 - rq0, out=tight[:, HI])
    return tight, keep


def area(t: Table) -> Ints:
    """Return the number of pairs in each band of a tight table.

    They are those of the rectangle, less a triangle beyond each diagonal. In a tight band no row and no column is
    empty, so the triangles lie inside the rectangle.
    """
    q0, q1, k0, k1, lo, hi = t.T
    above, below = k1 - q0 - hi, lo - k0 + q1  # one more than the diagonals beyond hi, and beyond lo
    return (q1 - q0) * (k1 - k0) - (above * (above - 1) + below * (below - 1)) // 2


def overlapping(a0: Ints, a1: Ints, b0: Ints, b1: Ints) -> tuple[Ints, Ints]:
    """Return all pairs (i, j) whose half-open intervals [a0, a1) and [b0, b1) share a point, ordered by i."""
    order = b0.argsort(kind="stable")
    starts, stops = b0[order], b1[order]
    furthest = np.maximum.accumulate(stops) if len(stops) else stops
    first = furthest.searchsorted(a0, side="right")
    last = starts.searchsorted(a1, side="left")
    count = np.maximum(last - first, 0)
    i = np.arange(len(a0)).repeat(count)
    j = order[ranges(first, count)]
    hit = (b1[j] > a0[i]) & (b0[j] < a1[i])
    return i[hit], j[hit]


def count_overlapping(a0: Ints, a1: Ints, b0: Ints, b1: Ints) -> Ints:
    """Count, for each interval [a0, a1), the intervals [b0, b1) that share a point with it. None of these may be empty.

    >>> count_overlapping(np.array([0, 5]), np.array([4, 9]), np.array([0, 3, 6]), np.array([3, 6, 8])).tolist()
    [2, 2]
    """
    return np.sort(b0).searchsorted(a1, side="left") - np.sort(b1).searchsorted(a0, side="right")


def ranges(first: Ints, count: Ints) -> Ints:
    """Return ``[first[0], first[0]+1, … (count[0] of them), first[1], …]``."""
    ends = count.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - (ends - count - first).repeat(count)


def intersect(a: Table, b: Table) -> Table:
    """Return the pairs that are in both tables. If the bands of each table are disjoint, so are those of the result."""
    i, j = overlapping(a[:, Q0], a[:, Q1], b[:, Q0], b[:, Q1])
    return tighten(intersect_pairwise(a[i], b[j]))


def intersect_pairwise(a: Table, b: Table) -> Table:
    """Intersect each band of ``a`` with the band of ``b`` in the same row. The results are not tight, and may be
    empty."""
    lower, upper = np.maximum(a, b), np.minimum(a, b)
    out = np.empty_like(a)
    out[:, [Q0, K0, LO]] = lower[:, [Q0, K0, LO]]
    out[:, [Q1, K1, HI]] = upper[:, [Q1, K1, HI]]
    return out


def subtract(a: Table, b: Table) -> Table:
    """Return the pairs of ``a`` that are not in ``b``."""
    for band in b:
        a = _without(a, band)
    return a


def _without(a: Table, band: Ints) -> Table:
    """Remove one band from each band of ``a``. At most six bands are left of each::

    a a a a a a     a  rows before q0          b  rows from q1 on
    l l . u u r     l  keys before k0          r  keys from k1 on
    l l d . u r     d  k - q < lo              u  k - q > hi
    b b b b b b     .  the removed band
    """
    q0, q1, k0, k1, lo, hi = band
    touched = (a[:, Q0] < q1) & (q0 < a[:, Q1]) & (a[:, K0] < k1) & (k0 < a[:, K1])
    touched &= (a[:, LO] <= hi) & (lo <= a[:, HI])
    if not touched.any():
        return a
    hit = a[touched]
    pieces = [a[~touched]]

    def clip(column: int, bound: int) -> Table:
        """Clip all bands of ``hit`` at one of their six bounds."""
        clipped = hit.copy()
        tighter = np.minimum if column in (Q1, K1, HI) else np.maximum
        clipped[:, column] = tighter(clipped[:, column], bound)
        return clipped

    # At each bound of the removed band: what lies outside is a piece of the result, what lies inside is clipped
    # further.
    for outer_column, inner_column, outer_bound, inner_bound in (
        (Q1, Q0, q0, q0),
        (Q0, Q1, q1, q1),
        (K1, K0, k0, k0),
        (K0, K1, k1, k1),
        (HI, LO, lo - 1, lo),
        (LO, HI, hi + 1, hi),
    ):
        pieces.append(clip(outer_column, outer_bound))
        hit = clip(inner_column, inner_bound)
    return tighten(np.concatenate(pieces))


def coalesce(t: Table) -> Table:
    """Join disjoint bands into fewer.

    Two disjoint bands are one band if and only if the smallest band around both has the area of the two together.

    >>> coalesce(table((0, 2, 0, 2, -9, 0), (2, 4, 0, 2, -9, 9), (2, 4, 2, 4, -9, 0))).tolist()
    [[0, 4, 0, 4, -3, 0]]
    """
    return coalesce_grouped(t, np.zeros(len(t), dtype=np.int64))[0]


def coalesce_grouped(t: Table, group: Ints) -> tuple[Table, Ints]:
    """Apply :func:`coalesce` within each group. Returns the bands and their groups, ordered by group, then rows, then
    columns."""
    by_rows, by_cols = (K0, Q1, Q0), (Q0, K1, K0)
    sizes = area(t)
    while True:
        before = len(t)
        for keys in (by_rows, by_cols):
            t, group, sizes = _join_neighbours(t, group, sizes, keys)
        if len(t) == before:
            order = np.lexsort((t[:, K0], _both(group, t[:, Q0])))
            return t[order], group[order]


def _join_neighbours(t: Table, group: Ints, sizes: Ints, keys: tuple[int, int, int]) -> tuple[Table, Ints, Ints]:
    """Sort, then join neighbours in the sorted order until no two neighbours join. ``sizes`` are the areas."""
    last, middle, first = (t[:, key] for key in keys)
    order = np.lexsort((_both(middle, last), _both(group, first)))
    t, group, sizes = t[order], group[order], sizes[order]
    while len(t) > 1:
        a, b = t[:-1], t[1:]
        upper, lower = np.minimum(a[:, Q1::2], b[:, Q1::2]), np.maximum(a[:, Q0::2], b[:, Q0::2])
        # Bands that join have rows and columns that overlap or touch.
        touch = (group[:-1] == group[1:]) & (lower[:, 0] <= upper[:, 0]) & (lower[:, 1] <= upper[:, 1])
        near = np.flatnonzero(touch)
        if not len(near):
            break
        a, b = t[near], t[near + 1]
        hull = np.minimum(a, b)
        np.maximum(a[:, Q1::2], b[:, Q1::2], out=hull[:, Q1::2])
        together = sizes[near] + sizes[near + 1]
        joining = np.flatnonzero(area(hull) == together)
        if not len(joining):
            break
        joining = joining[_every_second(near[joining])]
        first = near[joining]
        t[first], sizes[first] = hull[joining], together[joining]
        keep = np.ones(len(t), dtype=bool)
        keep[first + 1] = False
        t, group, sizes = t[keep], group[keep], sizes[keep]
    return t, group, sizes


def _every_second(index: Ints) -> Ints:
    """Return which of these increasing numbers to take: of consecutive ones every second, so that no band is joined
    twice in one pass.

    >>> _every_second(np.array([2, 3, 4, 5, 9, 10])).tolist()
    [0, 2, 4]
    """
    nth = np.arange(len(index))
    starts = np.append(True, index[1:] > index[:-1] + 1)
    return np.flatnonzero((nth - np.maximum.accumulate(np.where(starts, nth, 0))) % 2 == 0)


def _both(high: Ints, low: Ints) -> Ints:
    """Return one number for each pair, in the order of the pairs. Tokens are fewer than 2**31."""
    return (high << 32) + low


def dense(t: Table, rows: int, cols: int) -> NDArray[np.bool_]:
    """Return the bands as a boolean array of ``rows × cols``."""
    out = np.zeros((rows, cols), dtype=np.bool_)
    for q0, q1, k0, k1, lo, hi in t.tolist():
        diagonal = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
        out[q0:q1, k0:k1] |= (lo <= diagonal) & (diagonal <= hi)
    return out
