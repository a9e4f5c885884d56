"""The input of a strategy: mask, layouts and rank, and the tiles and rows that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts import Layout, Tiles, cut
from ringspan.masks import Band, Mask
from ringspan.masks import table as tables
from ringspan.masks.table import K0, K1, Q0, Q1, Table
from ringspan.plans.local_rows import LocalRows

Rows = tuple[tuple[int, int], ...]
Ints = NDArray[np.int64]

# Up to this many tiles, computing the tiles of all ranks takes about as long as those of one rank.
MAX_TILES_AT_ONCE = 4096
# The pairs of spans that are marked at once, which bounds the memory for them.
MAX_SEEN_AT_ONCE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(LocalRows):
    """A mask, the layouts of its queries and keys, and the rank to plan for."""

    mask: Mask
    q_layout: Layout
    kv_layout: Layout
    rank: int

    def seen(self) -> Tiles:
        """Return the tiles of this rank's queries with the keys of all ranks."""
        return _seen(self.mask, self.q_layout, self.kv_layout, self.rank)

    def seeing(self) -> Tiles:
        """Return the tiles of the queries of all ranks with this rank's keys."""
        return _seeing(self.mask, self.q_layout, self.kv_layout, self.rank)


# Cached because all strategies that are compared need the same tiles, and so do ranks that are planned in turn.
@cache_by_digest(64)
def _seen(mask: Mask, q_layout: Layout, kv_layout: Layout, rank: int) -> Tiles:
    if estimated_tiles(mask, q_layout, kv_layout) <= MAX_TILES_AT_ONCE:
        tiles = whole_tiles(mask, q_layout, kv_layout)
        return _where(tiles, tiles.q_rank == rank)
    return cut(mask, q_layout.pieces.of(rank), kv_layout.pieces)


@cache_by_digest(64)
def _seeing(mask: Mask, q_layout: Layout, kv_layout: Layout, rank: int) -> Tiles:
    if estimated_tiles(mask, q_layout, kv_layout) <= MAX_TILES_AT_ONCE:
        tiles = whole_tiles(mask, q_layout, kv_layout)
        return _where(tiles, tiles.k_rank == rank)
    return cut(mask, q_layout.pieces, kv_layout.pieces.of(rank))


@cache_by_digest(8)
def whole_tiles(mask: Mask, q_layout: Layout, kv_layout: Layout) -> Tiles:
    """Return the tiles of the queries of all ranks with the keys of all ranks."""
    return cut(mask, q_layout.pieces, kv_layout.pieces)


@cache_by_digest(8)
def estimated_tiles(mask: Mask, q_layout: Layout, kv_layout: Layout) -> int:
    """Return an estimate of the number of tiles of all ranks.

    A band has at most as many tiles as spans of queries times spans of keys that overlap it, unless spans with
    different steps are split further.
    """
    q0, q1, k0, k1, _, _ = mask.table.T
    queries = tables.count_overlapping(q0, q1, *q_layout.pieces.extent)
    keys = tables.count_overlapping(k0, k1, *kv_layout.pieces.extent)
    return int((queries * keys).sum())


def _where(tiles: Tiles, chosen: NDArray[np.bool_]) -> Tiles:
    return Tiles(tiles.q_rank[chosen], tiles.k_rank[chosen], tiles.bands[chosen])


@cache_by_digest(64, bytes_of=lambda rows: rows.nbytes)
def needed_rows(mask: Mask, q_layout: Layout, kv_layout: Layout) -> NDArray[np.int64]:
    """Return a matrix: the number of keys of rank ``column`` that at least one query of rank ``row`` sees."""
    tiles = whole_tiles(mask, q_layout, kv_layout)
    pair, start, stop = union(tiles.q_rank * q_layout.world + tiles.k_rank, tiles.bands[:, K0], tiles.bands[:, K1])
    total = np.zeros(q_layout.world**2, dtype=np.int64)
    np.add.at(total, pair, stop - start)
    total.setflags(write=False)
    return total.reshape(q_layout.world, q_layout.world)


def seen_ranks(mask: Mask, q_layout: Layout, kv_layout: Layout) -> NDArray[np.bool_]:
    """Return a matrix: whether the queries of rank ``row`` see any key of rank ``column``.

    Through a tight band, contiguous queries see contiguous keys, which belong to consecutive spans. So no tile is
    computed for each pair of thousands of ranks.
    """
    queries, keys = q_layout.pieces, kv_layout.pieces
    if (queries.step[queries.size > 1] > 1).any() or (keys.step[keys.size > 1] > 1).any():
        return needed_rows(mask, q_layout, kv_layout) > 0
    i, j = tables.overlapping(queries.start, queries.start + queries.size, mask.table[:, Q0], mask.table[:, Q1])
    band = mask.table[j]
    band[:, Q0] = np.maximum(band[:, Q0], queries.start[i])
    band[:, Q1] = np.minimum(band[:, Q1], (queries.start + queries.size)[i])
    band, kept = tables.tighten_indexed(band)
    order = np.argsort(keys.start)
    owner, start = keys.owner[order], keys.start[order]
    first = np.searchsorted(start, band[:, K0], side="right") - 1
    last = np.searchsorted(start, band[:, K1], side="left")
    sees = np.zeros((q_layout.world, kv_layout.world), dtype=np.bool_)
    rank = queries.owner[i[kept]]
    for at_once in np.array_split(np.arange(len(rank)), 1 + int((last - first).sum()) // MAX_SEEN_AT_ONCE):
        count = (last - first)[at_once]
        sees[np.repeat(rank[at_once], count), owner[tables.ranges(first[at_once], count)]] = True
    return sees


def union(group: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Join the intervals [start, stop) of each group where they touch. The result is sorted by group, then start."""
    if not len(group):
        return group, start, stop
    order = np.lexsort((start, group))
    group, start, stop = group[order], start[order], stop[order]
    offset = group << 32  # intervals are shorter than 2**31, so those of different groups never touch
    reach = np.maximum.accumulate(offset + stop)
    opens = np.ones(len(group), dtype=np.bool_)
    np.greater((offset + start)[1:], reach[:-1], out=opens[1:])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(group)) - 1
    return group[first], start[first], reach[last] - offset[last]


def as_bands(table: Table) -> tuple[Band, ...]:
    return tuple(map(Band._make, table.tolist()))


def bands_by_group(bands: Table, group: Ints) -> dict[int, tuple[Band, ...]]:
    """Return the bands of each group, joined into as few as possible."""
    bands, group = tables.coalesce_grouped(bands, group)
    cuts = np.flatnonzero(np.diff(group)) + 1
    parts = zip(np.split(bands, cuts), np.split(group, cuts), strict=True)
    return {int(g[0]): as_bands(b) for b, g in parts if len(g)}
