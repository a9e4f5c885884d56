"""Tables of bands: the algebra of :class:`~ringspan.masks.band.Band`, vectorised over bands.

A table is an int64 array with one band per row and the columns of ``Band``. A band has all pairs of a query q and a key
k with ``q0 <= q < q1``, ``k0 <= k < k1`` and ``lo <= k - q <= hi``. All functions are pure. They return tight bands
(see :func:`tighten`), except :func:`intersect_pairwise`. Their cost grows with the number of bands and of pairs of
bands whose rows overlap. It does not grow with the number of tokens, except for :func:`dense`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringspan.errors import MaskError

Table = NDArray[np.int64]
Ints = NDArray[np.int64]

Q0, Q1, K0, K1, LO, HI = range(6)

# The longest sequence: the area of a mask of this many queries and keys fits int64, and so do sums of such areas.
MAX_LENGTH = 2**31 - 1

# The most bands of a mask: as many documents, causal, over 64 ranks are planned in 0.1 s on a contiguous layout and in
# several seconds on a balanced one, in 200 MB.
MAX_BANDS = 2**18
# The most pairs of intervals, of bands with common rows, and of bands with common pairs that an operation lists at once.
MAX_PAIRS = 2**24
MAX_ROW_PAIRS = 2**22
MAX_BAND_PAIRS = 2**20
PAIRS_AT_ONCE = 2**18  # whose bands are compared
# Up to so many candidates for overlapping pairs are compared one by one.
FEW_CANDIDATES = 2**20
# Up to so many bands are subtracted one by one, and so many bands of users, which may all overlap.
FEW_BANDS = 2**11
FEW_BANDS_OF_USERS = 2**6

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


def overlapping(a0: Ints, a1: Ints, b0: Ints, b1: Ints, *, most: int = MAX_PAIRS) -> tuple[Ints, Ints]:
    """Return all pairs (i, j) whose half-open intervals [a0, a1) and [b0, b1) share a point, ordered by i.

    Raises a :class:`MaskError` if there are more than ``most`` pairs (and more than ``FEW_CANDIDATES``).
    """
    order = b0.argsort(kind="stable")
    starts, stops = b0[order], b1[order]
    furthest = np.maximum.accumulate(stops) if len(stops) else stops
    first = furthest.searchsorted(a0, side="right")
    last = starts.searchsorted(a1, side="left")
    count = np.maximum(last - first, 0)
    i, nth = None, None
    if (candidates := int(count.sum())) > FEW_CANDIDATES:
        i, nth = _overlapping_exactly(a0, a1, starts, stops, most, candidates // 4)
    if i is None or nth is None:
        i, nth = np.arange(len(a0)).repeat(count), ranges(first, count)
    j = order[nth]
    hit = (b1[j] > a0[i]) & (b0[j] < a1[i])
    return i[hit], j[hit]


def _overlapping_exactly(
    a0: Ints, a1: Ints, starts: Ints, stops: Ints, most: int, many: int
) -> tuple[Ints, Ints] | tuple[None, None]:
    """Do :func:`overlapping` for intervals [starts, stops) in the order of their starts, without other candidates.

    Of two intervals that overlap, either the second begins in the first, or the first begins inside the second.
    Returns None if there are at least ``many`` pairs: comparing all candidates is faster then.
    """
    order = a0.argsort(kind="stable")
    first, inside = starts.searchsorted(a0, side="left"), a0[order].searchsorted(starts, side="right")
    later = np.maximum(starts.searchsorted(a1, side="left") - first, 0)
    earlier = np.maximum(a0[order].searchsorted(stops, side="left") - inside, 0)
    if (count := int(later.sum() + earlier.sum())) > most:
        raise _too_many_pairs(len(a0), len(starts), count, most)
    if count >= many:
        return None, None
    i = np.concatenate([np.arange(len(a0)).repeat(later), order[ranges(inside, earlier)]])
    nth = np.concatenate([ranges(first, later), np.arange(len(starts)).repeat(earlier)])
    by_a = np.lexsort((nth, i))
    return i[by_a], nth[by_a]


def _too_many_pairs(a: int, b: int, pairs: int, most: int) -> MaskError:
    return MaskError(
        f"{a:,} and {b:,} bands or spans overlap in {pairs:,} pairs; at most {most:,} are possible: use fewer or shorter ones, "
        "or one rs.mask_mod for the whole mask"
    )


def check_count(bands: int, name: str, most: int = MAX_BANDS) -> None:
    """Raise if a mask would have more bands than are possible."""
    if bands > most:
        raise MaskError(
            f"{name:.60} has {bands:,} bands; at most {most:,} are possible: use fewer documents, chunks or blocks, or "
            "split the sequence into several masks"
        )


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
    i, j = touching(a, b)
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
    if len(a) and len(b):
        around = np.stack([a[:, 0::2].min(axis=0), a[:, 1::2].max(axis=0)], axis=1).reshape(1, 6)
        b = b[_touches(around, b)]
    if len(a) + len(b) > FEW_BANDS:
        return _subtract_in_rounds(a, b, *touching(a, b))
    for band in b:
        touched = _touches(a, band)
        if touched.any():
            a = np.concatenate([a[~touched], _without(a[touched], band)[0]])
    return a


def union(t: Table) -> Table:
    """Return disjoint bands with the pairs of bands that may overlap.

    >>> union(table((0, 2, 0, 4, -9, 9), (1, 3, 0, 4, -9, 9))).tolist()
    [[0, 2, 0, 4, -1, 3], [2, 3, 0, 4, -2, 1]]
    """
    if len(t) <= FEW_BANDS_OF_USERS:
        disjoint = t[:1]
        for n in range(1, len(t)):
            disjoint = np.concatenate([disjoint, subtract(t[n : n + 1], disjoint)])
        return disjoint
    i, j = touching(t, t)
    return _subtract_in_rounds(t, t, i[j < i], j[j < i])


def touching(a: Table, b: Table) -> tuple[Ints, Ints]:
    """Return the pairs of bands that touch, ordered by those of ``a``, then by the rows of those of ``b``."""
    i, j = overlapping(a[:, Q0], a[:, Q1], b[:, Q0], b[:, Q1], most=MAX_ROW_PAIRS)
    parts = [slice(n, n + PAIRS_AT_ONCE) for n in range(0, len(i), PAIRS_AT_ONCE)]
    hit = np.concatenate([np.zeros(0, dtype=np.bool_), *(_touches(a[i[part]], b[j[part]]) for part in parts)])
    if (count := int(hit.sum())) > MAX_BAND_PAIRS:
        raise _too_many_pairs(len(a), len(b), count, MAX_BAND_PAIRS)
    return i[hit], j[hit]


def _subtract_in_rounds(a: Table, b: Table, i: Ints, j: Ints) -> Table:
    """Remove band ``j[n]`` of ``b`` from band ``i[n]`` of ``a``, for pairs as those of :func:`touching`.

    A round removes the middle one of the bands that touch a band. About half of them touch each part that is left, so
    there are few rounds.
    """
    done, bands, pairs = [], 0, 0
    while True:
        count = np.bincount(i, minlength=len(a))
        done.append(a[count == 0])
        bands += len(done[-1])
        check_count(bands + int((count > 0).sum()), "the result, before bands are joined,", 4 * MAX_BANDS)
        if not len(i):
            return np.concatenate(done)
        a, count = a[count > 0], count[count > 0]
        middle = np.cumsum(count) - count + count // 2
        a, part_of = _without(a, b[j[middle]])
        j, count = np.delete(j, middle), count - 1
        first, count = (np.cumsum(count) - count)[part_of], count[part_of]
        pairs += int(count.sum())
        if count.sum() > 2 * MAX_BAND_PAIRS or pairs > 16 * MAX_BAND_PAIRS:
            raise MaskError(
                f"the bands of these masks overlap each other in more than {pairs:,} places, which are too many to join or "
                "subtract them: use fewer bands, or one rs.mask_mod for the whole mask"
            )
        i, j = np.arange(len(a)).repeat(count), j[ranges(first, count)]
        hit = _touches(a[i], b[j])
        i, j = i[hit], j[hit]


def _touches(a: Table, b: Table) -> NDArray[np.bool_]:
    """Return whether the rows, the columns and the diagonals of two bands overlap, for each row of the two tables."""
    rows_and_columns = (a[:, Q0] < b[..., Q1]) & (b[..., Q0] < a[:, Q1]) & (a[:, K0] < b[..., K1]) & (b[..., K0] < a[:, K1])
    return rows_and_columns & (a[:, LO] <= b[..., HI]) & (b[..., LO] <= a[:, HI])


def _without(a: Table, band: Table) -> tuple[Table, Ints]:
    """Remove from each band of ``a`` the band in the same row of the other table, or the one given. At most six bands are
    left of each; returns them, and which band of ``a`` each is a part of::

    a a a a a a     a  rows before q0          b  rows from q1 on
    l l . u u r     l  keys before k0          r  keys from k1 on
    l l d . u r     d  k - q < lo              u  k - q > hi
    b b b b b b     .  the removed band
    """
    q0, q1, k0, k1, lo, hi = band.T
    hit, pieces = a, []

    def clip(column: int, bound: Ints) -> Table:
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
    parts, kept = tighten_indexed(np.concatenate(pieces))
    return parts, kept % len(a)


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
