"""Convert runs of visible keys, row by row, into bands.

The n-th run of a row continues that of the row above if each end stays or moves by one key. As long as the ends move in
the same way, the runs are one band::

    x x . . .      ends: 0 2      one band: both ends move by one
    . x x . .            1 3
    . . x x .            2 4
    x . . . .            0 1      another band: the start moved back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringspan.masks import table as tables
from ringspan.masks.table import MAX_LENGTH, Ints, Table


class RowRuns(NamedTuple):
    """Query ``q`` sees the keys ``[start, stop)``. Ordered by query, then start."""

    q: Ints
    start: Ints
    stop: Ints

    @staticmethod
    def empty() -> RowRuns:
        return RowRuns(*np.zeros((3, 0), dtype=np.int64))

    @staticmethod
    def joined(parts: Sequence[RowRuns]) -> RowRuns:
        """Return the disjoint runs of all parts in order; runs that touch become one.

        >>> RowRuns.joined([RowRuns(*np.array([[0], [4], [6]])), RowRuns(*np.array([[0, 1], [2, 2], [4, 4]]))])
        RowRuns(q=array([0, 1]), start=array([2, 2]), stop=array([6, 4]))
        """
        q, start, stop = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((start, q))
        q, start, stop = q[order], start[order], stop[order]
        touches = (q[1:] == q[:-1]) & (start[1:] == stop[:-1])
        begins, ends = np.append(True, ~touches)[: len(q)], np.append(~touches, True)[-len(q) or 1 :]
        return RowRuns(q[begins], start[begins], stop[ends])


def bands_of_runs(runs: RowRuns) -> Table:
    """Return the runs as bands, joined into few bands.

    >>> bands_of_runs(RowRuns(np.arange(4), np.array([0, 0, 0, 1]), np.arange(4) + 1)).tolist()
    [[0, 4, 0, 4, -2, 0]]
    """
    if not len(runs.q):
        return tables.EMPTY
    nth = np.arange(len(runs.q)) - np.searchsorted(runs.q, runs.q)
    order = np.lexsort((runs.q, nth))
    nth, q, start, stop = nth[order], runs.q[order], runs.start[order], runs.stop[order]
    start_moves, stop_moves = np.diff(start), np.diff(stop)
    goes_on = (np.diff(nth) == 0) & (np.diff(q) == 1) & (start_moves >> 1 == 0) & (stop_moves >> 1 == 0)
    # How both ends move, as one number; -1 where a run does not continue.
    how = np.where(goes_on, 2 * start_moves + stop_moves, -1)
    before = np.concatenate([[-1], how[:-1]])
    cut = np.flatnonzero((how == -1) | ((before != -1) & (how != before)))
    first, last = np.concatenate([[0], cut + 1]), np.concatenate([cut, [len(q) - 1]])
    # For a band of a single row this does not matter.
    moves = np.append(how, -1)[first]
    lo = np.where(moves >> 1 == 1, start[first] - q[first], -MAX_LENGTH)
    hi = np.where(moves & 1 == 1, stop[first] - 1 - q[first], MAX_LENGTH)
    lo, hi = np.where(last > first, lo, -MAX_LENGTH), np.where(last > first, hi, MAX_LENGTH)
    return tables.coalesce(tables.tighten(np.stack([q[first], q[last] + 1, start[first], stop[last], lo, hi], axis=1)))
