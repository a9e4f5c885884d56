"""Convert bands to calls of flash attention: a tight band is one window, and many small bands are one call.

Bands, and what makes one tight, are defined in :mod:`ringspan.masks.band`. Flash attention counts its window from the
bottom right corner: query ``i`` of S attends to key ``j`` of T iff ``-left <= j - i - (T - S) <= right``. The diagonals
of a tight band pass through its rectangle, so left and right are never negative. A band with no more queries than keys
is one call, whatever its shape: rectangle, triangle, window or trapezoid. A band with more queries than keys may be up
to three calls (:func:`_split_tall_band`).

Bands of one window that share neither queries nor keys are the *sequences* of one variable-length call, and so are the
gaps between them. For queries without keys the kernel returns out 0 and lse -inf (FlashAttention-2 returns lse +inf,
which :mod:`ringspan.kernels.flash` replaces)::

    x . . . . .
    x x . . . .        queries  0 1 | 2 |     | 3 4      four sequences: 2, 1, 0, 2 queries
    . . . . . .        keys     0 1 |   | 2 3 | 4 5                      2, 0, 2, 2 keys
    . . . . x .
    . . . . x x
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspan.caching.by_stream import cache_by_stream, copy_to_device
from ringspan.masks import Band
from ringspan.masks import table as tables


class Window(NamedTuple):
    """The window of a call. None means no limit on that side."""

    left: int | None
    right: int | None

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0


def window_of_band(band: Band) -> Window:
    """Return the window of a tight band.

    >>> window_of_band(Band(0, 4, 0, 4, -3, 0)), window_of_band(Band(0, 2, 0, 4, -1, 3))
    (Window(left=None, right=0), Window(left=None, right=None))
    >>> window_of_band(Band(0, 3, 2, 6, 1, 3))
    Window(left=2, right=0)
    """
    corner = (band.k1 - band.q1) if band.rows and band.cols else 0
    left = corner - band.lo if band.cut_below else None
    right = band.hi - corner if band.cut_above else None
    return Window(left, right)


class Sequences(NamedTuple):
    """The sequences of queries, or of keys: cumulative lengths (int32, on the device) and the greatest length."""

    cu_seqlens: Tensor
    max_seqlen: int


class FlashCall(NamedTuple):
    """One call of flash attention: a range of queries and of keys, and a window, as one sequence or as several."""

    queries: slice
    query_parts: tuple[slice, ...]
    """The parts of ``queries`` whose results and gradients are used: all but large gaps."""
    keys: slice
    window: Window
    q_sequences: Sequences | None = None
    k_sequences: Sequences | None = None


# Results of fewer rows than this cost less than a launch more.
MIN_GAP = 1024


@cache_by_stream(1024)
def make_flash_calls(bands: tuple[Band, ...], device: torch.device) -> tuple[FlashCall, ...]:
    """Return the calls that together compute each pair of the bands once."""
    seen = query_ranges(bands)
    return tuple(_make_call(group, seen, device) for group in group_bands(bands))


def query_ranges(bands: Sequence[Band]) -> list[tuple[int, int]]:
    """Return ranges that contain the queries of all bands, and no gap of at least ``MIN_GAP`` rows between them.

    Results of such gaps need not be merged: no call of these bands computes any. Queries that some call computes are
    never left out of the results of the other calls: an accumulator takes a result of all rows without a copy.

    >>> query_ranges([Band(4000, 5000, 0, 9, -5000, 8), Band(0, 100, 0, 9, -99, 8), Band(50, 600, 0, 9, -599, 8)])
    [(0, 600), (4000, 5000)]
    """
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted((band.q0, band.q1) for band in bands):
        if ranges and start - ranges[-1][1] < MIN_GAP:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], stop)
        else:
            ranges.append((start, stop))
    return ranges


def group_bands(bands: Sequence[Band]) -> Iterator[list[Band]]:
    """Yield as few groups as possible. The bands of a group have one window, and their queries and keys increase.

    >>> bands = [Band(0, 4, 0, 4, -3, 0), Band(4, 6, 4, 6, -1, 0), Band(4, 6, 0, 4, -5, -1)]
    >>> [len(group) for group in group_bands(bands)]
    [2, 1]
    """
    groups_by_window: dict[Window, list[list[Band]]] = {}
    for band in sorted(piece for whole in bands for piece in _split_tall_band(whole)):
        groups = groups_by_window.setdefault(window_of_band(band), [])
        fitting = [group for group in groups if group[-1].q1 <= band.q0 and group[-1].k1 <= band.k0]
        if fitting:
            max(fitting, key=lambda group: group[-1].k1).append(band)  # the tightest fit leaves the most groups open
        else:
            groups.append([band])
    for groups in groups_by_window.values():
        yield from groups


def _split_tall_band(band: Band) -> list[Band]:
    """Return the band. If it has more queries than keys (S > T), split it into bands whose windows are at most T long.

    FlashAttention-2 replaces a side of the window >= T by -1 (unlimited). If the other side is limited, it then
    replaces -1 by T. If S > T, a side of T does not cover all keys. Therefore the queries are cut at the first that
    attends to the last key and at the first that does not attend to the first key.

    >>> [tuple(piece) for piece in _split_tall_band(Band(0, 6, 0, 2, -4, 0))]
    [(0, 1, 0, 1, 0, 0), (1, 5, 0, 2, -4, 0), (5, 6, 1, 2, -4, -4)]
    """
    if band.rows <= band.cols or band.is_full:
        return [band]
    attends_to_last, misses_first = band.k1 - 1 - band.hi, band.k0 - band.lo + 1
    cuts = sorted({band.q0, band.q1, *(q for q in (attends_to_last, misses_first) if band.q0 < q < band.q1)})
    return [Band(*row) for q0, q1 in pairwise(cuts) for row in tables.table((q0, q1, *band[2:])).tolist()]


def _make_call(group: Sequence[Band], seen: Sequence[tuple[int, int]], device: torch.device) -> FlashCall:
    queries, keys = slice(group[0].q0, group[-1].q1), slice(group[0].k0, group[-1].k1)
    if len(group) == 1:
        return FlashCall(queries, (queries,), keys, window_of_band(group[0]))
    q_cuts, k_cuts = [0], [0]

    def end_sequence(q: int, k: int) -> None:
        q_cuts.append(q)
        k_cuts.append(k)

    for band in group:
        q0, k0 = band.q0 - queries.start, band.k0 - keys.start
        # Between two bands: a sequence of queries without keys, and one of keys without queries.
        if q_cuts[-1] < q0:
            end_sequence(q0, k_cuts[-1])
        if k_cuts[-1] < k0:
            end_sequence(q0, k0)
        end_sequence(band.q1 - queries.start, band.k1 - keys.start)
    inside = [(max(start, queries.start), min(stop, queries.stop)) for start, stop in seen]
    parts = tuple(slice(start, stop) for start, stop in inside if start < stop)
    q_sequences, k_sequences = (_make_sequences(cuts, device) for cuts in (q_cuts, k_cuts))
    return FlashCall(queries, parts, keys, window_of_band(group[0]), q_sequences, k_sequences)


def _make_sequences(cuts: list[int], device: torch.device) -> Sequences:
    return Sequences(
        copy_to_device(np.array(cuts, dtype=np.int32), device), max(stop - start for start, stop in pairwise(cuts))
    )
