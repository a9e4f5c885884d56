"""Convert bands to layers. In a layer every query sees one interval of keys, so two numbers per row describe the mask.

Adjacent bands are one interval of a row. The first intervals of all rows are the first layer, the second intervals the
second. So there are as many layers as the row with the most intervals has intervals, whatever the number of bands::

    all but the diagonal             layer 0          layer 1
    . x x x x                        . x x x x        . . . . .
    x . x x x                        x . . . .        . . x x x
    x x . x x                        x x . . .        . . . x x
    x x x . x                        x x x . .        . . . . x
    x x x x .                        x x x x .        . . . . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringspan.masks import Band
from ringspan.masks import table as tables
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalLayer:
    """A rectangle. Its query ``i`` sees its keys ``start[i] <= k < stop[i]``, both counted from its corner."""

    q0: int
    q1: int
    k0: int
    k1: int
    start: Ints
    stop: Ints


def interval_layers(bands: Sequence[Band]) -> Iterator[IntervalLayer]:
    """Yield the fewest layers that contain each pair of these disjoint bands once.

    >>> [layer] = interval_layers([Band(0, 2, 0, 2, -1, 1), Band(1, 2, 2, 4, 1, 2)])
    >>> layer.start.tolist(), layer.stop.tolist()
    ([0, 0], [2, 4])
    """
    q, start, stop = _join_intervals(*_rows(tables.table(*bands)))
    if not len(q):
        return
    # The n-th interval of a row belongs to the n-th layer.
    first_of_row = np.searchsorted(q, q)
    layer = np.arange(len(q)) - first_of_row
    by_layer = np.argsort(layer, kind="stable")
    for in_layer in np.split(by_layer, np.cumsum(np.bincount(layer))[:-1]):
        yield _layer(q[in_layer], start[in_layer], stop[in_layer])


def _rows(t: tables.Table) -> tuple[Ints, Ints, Ints]:
    """Return the query and the interval of keys of every row of every band, ordered by query, then by key."""
    count = t[:, Q1] - t[:, Q0]
    q = tables.ranges(t[:, Q0], count)
    band = t[np.repeat(np.arange(len(t)), count)]
    start = np.maximum(band[:, K0], q + band[:, LO])
    stop = np.minimum(band[:, K1], q + band[:, HI] + 1)
    order = np.lexsort((start, q))
    return q[order], start[order], stop[order]


def _join_intervals(q: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Join adjacent intervals of a row."""
    apart = np.ones(len(q) + 1, dtype=np.bool_)
    apart[1:-1] = (q[1:] != q[:-1]) | (start[1:] != stop[:-1])
    return q[apart[:-1]], start[apart[:-1]], stop[apart[1:]]


def _layer(q: Ints, start: Ints, stop: Ints) -> IntervalLayer:
    """Make a layer of rows that have one interval each. Rows between them get an empty interval."""
    q0, q1, k0, k1 = int(q[0]), int(q[-1]) + 1, int(start.min()), int(stop.max())
    both = np.zeros((2, q1 - q0), dtype=np.int64)
    both[:, q - q0] = start - k0, stop - k0
    return IntervalLayer(q0=q0, q1=q1, k0=k0, k1=k1, start=both[0], stop=both[1])
