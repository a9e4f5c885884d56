"""From bands to flash attention's own calls: a tight band is exactly one window, and many small bands are one call.

Flash attention counts its window from the bottom right corner: query ``i`` of S sees key ``j`` of T iff
``-left <= j - i - (T - S) <= right``. In a tight band both corners of the diagonal lie inside the rectangle, so that left and
right are never negative and any band is one launch: rectangle, triangle, window or trapezoid. Bands of one window that share
neither queries nor keys are the *sequences* of one call of variable lengths, and so are the gaps between them::

    x . . . . .
    x x . . . .        queries  0 1 | 2 |     | 3 4      four sequences: 2, 1, 0, 2 queries
    . . . . . .        keys     0 1 |   | 2 3 | 4 5                      2, 0, 2, 2 keys
    . . . . x .
    . . . . x x
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.masks import Band
from ringspan.masks import table as tables


class Window(NamedTuple):
    """A band as flash attention says it; None is no limit on that side."""

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


class Lengths(NamedTuple):
    """Where the sequences of one side begin and end: int32, on the device, one more than there are sequences."""

    cuts: Tensor
    longest: int


class Batch(NamedTuple):
    """One call: these rows and keys through this window, as one sequence or, where lengths are given, as many."""

    rows: slice
    keys: slice
    window: Window
    queries: Lengths | None = None
    seen: Lengths | None = None


@lru_cache(maxsize=1024)
def batches(bands: tuple[Band, ...], device: torch.device) -> tuple[Batch, ...]:
    """Calls that together cover each band once."""
    return tuple(_batch(layer, device) for layer in layers(bands))


def layers(bands: Sequence[Band]) -> Iterator[list[Band]]:
    """Bands of one window in as few groups as possible in which queries and keys both go up from band to band.

    >>> [len(layer) for layer in layers([Band(0, 4, 0, 4, -3, 0), Band(4, 6, 4, 6, -1, 0), Band(4, 6, 0, 4, -5, -1)])]
    [2, 1]
    """
    of_window: dict[Window, list[list[Band]]] = {}
    for band in sorted(part for whole in bands for part in _within_reach(whole)):
        stacks = of_window.setdefault(window(band), [])
        open_ = [layer for layer in stacks if layer[-1].q1 <= band.q0 and layer[-1].k1 <= band.k0]
        if open_:
            max(open_, key=lambda layer: layer[-1].k1).append(band)  # the tightest fit leaves most room for those to come
        else:
            stacks.append([band])
    for stacks in of_window.values():
        yield from stacks


def _within_reach(band: Band) -> list[Band]:
    """The band, or where its window would reach further right than there are keys, its upper and its lower rows.

    FlashAttention-2 takes such a window for none, which is wrong where there are more queries than keys. Rows above the one
    that sees the last key end at the diagonal, rows below are not cut by it.

    >>> _within_reach(Band(0, 6, 0, 2, -4, 0))
    [Band(q0=0, q1=2, k0=0, k1=2, lo=-1, hi=0), Band(q0=2, q1=6, k0=0, k1=2, lo=-4, hi=-1)]
    """
    right = window(band).right
    if right is None or right < band.cols:
        return [band]
    last = band.k1 - 1 - band.hi  # the first row that sees the last key
    parts = tables.table((band.q0, last + 1, *band[2:]), (last + 1, band.q1, *band[2:]))
    return [Band(*row) for row in parts.tolist()]


def _batch(layer: Sequence[Band], device: torch.device) -> Batch:
    rows, keys = slice(layer[0].q0, layer[-1].q1), slice(layer[0].k0, layer[-1].k1)
    if len(layer) == 1:
        return Batch(rows, keys, window(layer[0]))
    q, k = [0], [0]
    for band in layer:
        q0, q1, k0, k1 = (band.q0 - rows.start, band.q1 - rows.start, band.k0 - keys.start, band.k1 - keys.start)
        # What no band has becomes a sequence of queries without keys, or of keys without queries.
        if q[-1] < q0:
            q, k = [*q, q0], [*k, k[-1]]
        if k[-1] < k0:
            q, k = [*q, q[-1]], [*k, k0]
        q, k = [*q, q1], [*k, k1]
    return Batch(rows, keys, window(layer[0]), _lengths(q, device), _lengths(k, device))


def _lengths(cuts: list[int], device: torch.device) -> Lengths:
    on_host = torch.tensor(cuts, dtype=torch.int32)
    longest = int(on_host.diff().max())
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # else the copy would make the host wait for the device
    return Lengths(on_host.to(device, non_blocking=True), longest)
