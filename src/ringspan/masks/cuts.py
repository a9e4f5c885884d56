"""Places in a sequence across which no query sees a key.

A tight band connects all tokens from its first to its last, except a diagonal, in which each token sees only itself::

    x . . .
    x x . .      one band, and a diagonal of two tokens: the cuts are 2 and 3
    . . x .
    . . . x
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringspan.masks import table as tables
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1, Ints, Table


def is_crossed(t: Table, cuts: Ints) -> NDArray[np.bool_]:
    """Return for each of some places whether a query sees a key across it. The table must be tight.

    >>> is_crossed(tables.table((0, 2, 0, 2, -9, 0), (2, 4, 2, 4, 0, 0)), np.arange(5)).tolist()
    [False, True, False, False, False]
    """
    connected = t[~_is_diagonal(t)]
    start, stop = np.minimum(connected[:, Q0], connected[:, K0]), np.maximum(connected[:, Q1], connected[:, K1])
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(np.append(0, stop[order]))
    return reach[start[order].searchsorted(cuts)] > cuts


def cuts_of_diagonals(t: Table) -> Ints:
    """Return the places between tokens of a diagonal that no other band reaches across."""
    diagonal = t[_is_diagonal(t)]
    inside = tables.ranges(diagonal[:, Q0] + 1, diagonal[:, Q1] - diagonal[:, Q0] - 1)
    return inside[~is_crossed(t, inside)]


def _is_diagonal(t: Table) -> NDArray[np.bool_]:
    return (t[:, LO] == 0) & (t[:, HI] == 0)
