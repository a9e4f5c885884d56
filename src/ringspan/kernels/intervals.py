"""From bands to layers: in a layer every query sees one interval of keys, so that two numbers a row are the whole mask.

Bands that lie side by side in a row are one interval of it. The first interval of every row makes the first layer, the second
ones the second: as few layers as the row with the most intervals allows, whatever the number of bands::

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
    """A rectangle of queries × keys; its query ``i`` sees its keys ``start[i] <= k < stop[i]``, counted from its corner."""

    q0: int
    q1: int
    k0: int
    k1: int
    start: Ints
    stop: Ints


def interval_layers(bands: Sequence[Band]) -> Iterator[IntervalLayer]:
    """The fewest layers that hold each pair of these disjoint bands once.

    >>> [layer] = interval_layers([Band(0, 2, 0, 2, -1, 1), Band(1, 2, 2, 4, 1, 2)])
    >>> layer.start.tolist(), layer.stop.tolist()
    ([0, 0], [2, 4])
    """
    q, start, stop = _join_intervals(*_rows(tables.table(*bands)))
    if not len(q):
        return
    # The n-th run of its row goes to the n-th layer.
    first_of_row = np.searchsorted(q, q)
    layer = np.arange(len(q)) - first_of_row
    by_layer = np.argsort(layer, kind="stable")
    for mine in np.split(by_layer, np.cumsum(np.bincount(layer))[:-1]):
        yield _layer(q[mine], start[mine], stop[mine])


def _rows(t: tables.Table) -> tuple[Ints, Ints, Ints]:
    """Every row of every band: its query, and the interval of keys that the band shows it. Ordered by query, then keys."""
    count = t[:, Q1] - t[:, Q0]
    q = tables.ranges(t[:, Q0], count)
    band = t[np.repeat(np.arange(len(t)), count)]
    start = np.maximum(band[:, K0], q + band[:, LO])
    stop = np.minimum(band[:, K1], q + band[:, HI] + 1)
    order = np.lexsort((start, q))
    return q[order], start[order], stop[order]


def _join_intervals(q: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Join the intervals of a row that lie side by side."""
    apart = np.ones(len(q) + 1, dtype=np.bool_)
    apart[1:-1] = (q[1:] != q[:-1]) | (start[1:] != stop[:-1])
    return q[apart[:-1]], start[apart[:-1]], stop[apart[1:]]


def _layer(q: Ints, start: Ints, stop: Ints) -> IntervalLayer:
    q0, q1, k0, k1 = int(q[0]), int(q[-1]) + 1, int(start.min()), int(stop.max())
    both = np.zeros((2, q1 - q0), dtype=np.int64)
    both[:, q - q0] = start - k0, stop - k0
    return IntervalLayer(q0=q0, q1=q1, k0=k0, k1=k1, start=both[0], stop=both[1])
