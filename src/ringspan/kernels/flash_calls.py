"""From bands to calls of flash attention: a tight band is exactly one window, and many small bands are one call.

Flash attention counts its window from the bottom right corner: query ``i`` of S sees key ``j`` of T iff
``-left <= j - i - (T - S) <= right``. In a tight band both corners of the diagonal lie inside the rectangle. So left
and right are never negative, and any band is one call: rectangle, triangle, window or trapezoid. Bands of one window
that share neither queries nor keys are the *sequences* of one variable-length call, and so are the gaps between them::

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

from ringspan.caching.by_stream import cache_by_stream, on_device
from ringspan.masks import Band
from ringspan.masks import table as tables


class Window(NamedTuple):
    """A band in the terms of flash attention. None: no limit on that side."""

    left: int | None
    right: int | None

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0


def window(band: Band) -> Window:
    """The window of a tight band.

    >>> window(Band(0, 4, 0, 4, -3, 0)), window(Band(0, 2, 0, 4, -1, 3)), window(Band(0, 3, 2, 6, 1, 3))
    (Window(left=None, right=0), Window(left=None, right=None), Window(left=2, right=0))
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
    """One call: these queries and keys through this window, as one sequence or as several."""

    rows: slice
    keys: slice
    window: Window
    q_sequences: Sequences | None = None
    k_sequences: Sequences | None = None


@cache_by_stream(1024)
def make_flash_calls(bands: tuple[Band, ...], device: torch.device) -> tuple[FlashCall, ...]:
    """The calls that together compute each pair of the bands once."""
    return tuple(_make_call(group, device) for group in group_bands(bands))


def group_bands(bands: Sequence[Band]) -> Iterator[list[Band]]:
    """As few groups as possible of bands that have one window and whose queries and keys increase from band to band.

    >>> bands = [Band(0, 4, 0, 4, -3, 0), Band(4, 6, 4, 6, -1, 0), Band(4, 6, 0, 4, -5, -1)]
    >>> [len(group) for group in group_bands(bands)]
    [2, 1]
    """
    of_window: dict[Window, list[list[Band]]] = {}
    for band in sorted(part for whole in bands for part in _split_tall_band(whole)):
        groups = of_window.setdefault(window(band), [])
        fitting = [group for group in groups if group[-1].q1 <= band.q0 and group[-1].k1 <= band.k0]
        if fitting:
            max(fitting, key=lambda group: group[-1].k1).append(band)  # the tightest fit leaves the most groups open
        else:
            groups.append([band])
    for groups in of_window.values():
        yield from groups


def _split_tall_band(band: Band) -> list[Band]:
    """The band or, if it has more queries than keys, its rows cut into bands whose windows are no longer than the keys.

    FlashAttention-2 treats a side of a window that is at least as long as the keys as unlimited, and an unlimited side
    as one of the length of the keys. Both are wrong if there are more queries than keys. So the rows are cut where
    either diagonal enters or leaves the range of keys.

    >>> [tuple(part) for part in _split_tall_band(Band(0, 6, 0, 2, -4, 0))]
    [(0, 1, 0, 1, 0, 0), (1, 5, 0, 2, -4, 0), (5, 6, 1, 2, -4, -4)]
    """
    if band.rows <= band.cols or band.is_full:
        return [band]
    sees_last, misses_first = band.k1 - 1 - band.hi, band.k0 - band.lo + 1
    cuts = sorted({band.q0, band.q1, *(row for row in (sees_last, misses_first) if band.q0 < row < band.q1)})
    return [Band(*row) for q0, q1 in pairwise(cuts) for row in tables.table((q0, q1, *band[2:])).tolist()]


def _make_call(group: Sequence[Band], device: torch.device) -> FlashCall:
    rows, keys = slice(group[0].q0, group[-1].q1), slice(group[0].k0, group[-1].k1)
    if len(group) == 1:
        return FlashCall(rows, keys, window(group[0]))
    q, k = [0], [0]
    for band in group:
        q0, q1, k0, k1 = (band.q0 - rows.start, band.q1 - rows.start, band.k0 - keys.start, band.k1 - keys.start)
        # Between two bands: a sequence of queries without keys, and one of keys without queries.
        if q[-1] < q0:
            q, k = [*q, q0], [*k, k[-1]]
        if k[-1] < k0:
            q, k = [*q, q[-1]], [*k, k0]
        q, k = [*q, q1], [*k, k1]
    return FlashCall(rows, keys, window(group[0]), _make_sequences(q, device), _make_sequences(k, device))


def _make_sequences(cuts: list[int], device: torch.device) -> Sequences:
    return Sequences(on_device(np.array(cuts, dtype=np.int32), device), max(b - a for a, b in pairwise(cuts)))
