"""Convert bands to calls of PyTorch's fused attention, which supports full, causal and dense masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringspan.caching.by_digest import cache_by_digest
from ringspan.kernels.containment import is_one_part
from ringspan.masks import Band
from ringspan.masks import table as tables

# How many hidden pairs may be computed if that saves a call.
WASTE = 4096
# The most rows of a call within a window.
BLOCK = 512


class RectangleCall(NamedTuple):
    """One call over a rectangle: all of it, its lower triangle from the top left, or ``bands`` by a dense mask."""

    q0: int
    q1: int
    k0: int
    k1: int
    is_causal: bool = False
    bands: tuple[Band, ...] = ()
    has_other_parts: bool = False
    """Whether it has queries or keys of several independent parts (:mod:`ringspan.kernels.containment`)."""


@cache_by_digest(1024, plain=True)
def make_sdpa_calls(bands: tuple[Band, ...], join_parts: bool = True) -> tuple[RectangleCall, ...]:
    """Return the calls that together compute each pair of the bands once.

    ``join_parts``: whether a call may have queries and keys of several independent parts.

    >>> make_sdpa_calls((Band(0, 8, 0, 8, -7, 0),))
    (RectangleCall(q0=0, q1=8, k0=0, k1=8, is_causal=True, bands=(), has_other_parts=False),)
    """
    return tuple(call for group in _grouped(sorted(bands), join_parts) for call in _of_group(group))


def _grouped(bands: Sequence[Band], join_parts: bool) -> Iterator[list[Band]]:
    """Group neighbouring bands whose common rectangle has few more pairs than they have."""
    group: list[Band] = []
    area = 0
    for band in bands:
        is_wasteful = group and _cells(_hull([*group, band])) > area + band.area + WASTE
        if is_wasteful or (group and not join_parts and not is_one_part((*group, band))):
            yield group
            group, area = [], 0
        group.append(band)
        area += band.area
    if group:
        yield group


def _of_group(group: Sequence[Band]) -> Iterator[RectangleCall]:
    if len(group) > 1:
        yield _masked_call(*_hull(group), tuple(group))
        return
    (band,) = group
    rectangle = band[:4]
    ahead = band.hi - (band.k0 - band.q0)
    if band.is_full:
        yield RectangleCall(*rectangle)
    elif band.cut_below:
        yield from _by_rows(band)
    elif ahead == 0:
        yield RectangleCall(*rectangle, is_causal=True)
    elif _cells(rectangle) <= band.area + WASTE:
        yield _masked_call(*rectangle, (band,))
    else:
        # All rows see the first ``ahead`` keys; the rest is a triangle.
        yield RectangleCall(band.q0, band.q1, band.k0, band.k0 + ahead)
        yield RectangleCall(band.q0, band.q1, band.k0 + ahead, band.k1, is_causal=True)


def _masked_call(q0: int, q1: int, k0: int, k1: int, bands: tuple[Band, ...]) -> RectangleCall:
    return RectangleCall(q0, q1, k0, k1, bands=bands, has_other_parts=not is_one_part(bands))


def _by_rows(band: Band) -> Iterator[RectangleCall]:
    """Split a window into blocks of rows, each with the keys that any of its rows sees."""
    block = min(BLOCK, max(64, band.hi - band.lo + 1))
    for q0 in range(band.q0, band.q1, block):
        (row,) = tables.table((q0, min(q0 + block, band.q1), *band[2:])).tolist()
        piece = Band(*row)
        yield RectangleCall(*piece[:4]) if piece.is_full else _masked_call(*piece[:4], (piece,))


def _hull(bands: Sequence[Band]) -> tuple[int, int, int, int]:
    """Return the smallest rectangle that contains the bands."""
    q0, q1, k0, k1 = zip(*(band[:4] for band in bands), strict=True)
    return min(q0), max(q1), min(k0), max(k1)


def _cells(rectangle: tuple[int, int, int, int]) -> int:
    q0, q1, k0, k1 = rectangle
    return (q1 - q0) * (k1 - k0)
