"""What a strategy gets: mask, layouts and rank, and what they say about who sees which rows."""

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

# Up to so many tiles, cutting them for all ranks at once takes about as long as for one rank.
FEW_TILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(LocalRows):
    """A mask, the layouts of its queries and keys, and the rank to plan for."""

    mask: Mask
    q_layout: Layout
    kv_layout: Layout
    rank: int

    def seen(self) -> Tiles:
        """What this rank's queries see of the keys of all ranks."""
        return _seen(self.mask, self.q_layout, self.kv_layout, self.rank)

    def seeing(self) -> Tiles:
        """What the queries of all ranks see of this rank's keys."""
        return _seeing(self.mask, self.q_layout, self.kv_layout, self.rank)


# Cached because all strategies that are compared need the same tiles, and so do ranks that are planned in turn.
@cache_by_digest(64)
def _seen(mask: Mask, q_layout: Layout, kv_layout: Layout, rank: int) -> Tiles:
    if estimated_tiles(mask, q_layout, kv_layout) <= FEW_TILES:
        tiles = whole_tiles(mask, q_layout, kv_layout)
        return _where(tiles, tiles.q_rank == rank)
    return cut(mask, q_layout.pieces.of(rank), kv_layout.pieces)


@cache_by_digest(64)
def _seeing(mask: Mask, q_layout: Layout, kv_layout: Layout, rank: int) -> Tiles:
    if estimated_tiles(mask, q_layout, kv_layout) <= FEW_TILES:
        tiles = whole_tiles(mask, q_layout, kv_layout)
        return _where(tiles, tiles.k_rank == rank)
    return cut(mask, q_layout.pieces, kv_layout.pieces.of(rank))


@cache_by_digest(8)
def whole_tiles(mask: Mask, q_layout: Layout, kv_layout: Layout) -> Tiles:
    """What the queries of all ranks see of the keys of all ranks."""
    return cut(mask, q_layout.pieces, kv_layout.pieces)


@cache_by_digest(8)
def estimated_tiles(mask: Mask, q_layout: Layout, kv_layout: Layout) -> int:
    """About how many tiles there are for all ranks. A band has at most as many as its pieces of queries times its
    pieces of keys, unless their steps differ and pieces are split further."""
    q0, q1, k0, k1, _, _ = mask.table.T
    queries = tables.count_overlapping(q0, q1, *q_layout.pieces.extent)
    keys = tables.count_overlapping(k0, k1, *kv_layout.pieces.extent)
    return int((queries * keys).sum())


def _where(tiles: Tiles, chosen: NDArray[np.bool_]) -> Tiles:
    return Tiles(tiles.q_rank[chosen], tiles.k_rank[chosen], tiles.bands[chosen])


@cache_by_digest(64)
def needed_rows(mask: Mask, q_layout: Layout, kv_layout: Layout) -> NDArray[np.int64]:
    """A matrix: how many keys of rank ``column`` the queries of rank ``row`` see at least one pair with."""
    tiles = whole_tiles(mask, q_layout, kv_layout)
    pair, start, stop = union(tiles.q_rank * q_layout.world + tiles.k_rank, tiles.bands[:, K0], tiles.bands[:, K1])
    total = np.zeros(q_layout.world**2, dtype=np.int64)
    np.add.at(total, pair, stop - start)
    total.setflags(write=False)
    return total.reshape(q_layout.world, q_layout.world)


def seen_ranks(mask: Mask, q_layout: Layout, kv_layout: Layout) -> NDArray[np.bool_]:
    """A matrix: whether the queries of rank ``row`` see any key of rank ``column``.

    A run of queries sees a run of keys without gaps through a tight band, which is a run of the keys' pieces. So no
    tile is needed for each pair of thousands of ranks.
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
    for rank, a, b in zip(queries.owner[i[kept]].tolist(), first.tolist(), last.tolist(), strict=True):
        sees[rank, owner[a:b]] = True
    return sees


def union(group: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Within each group, the intervals [start, stop) joined where they touch; sorted by group, then start."""
    if not len(group):
        return group, start, stop
    order = np.lexsort((start, group))
    group, start, stop = group[order], start[order], stop[order]
    apart = group << 32  # intervals are shorter than 2**31, so those of different groups never touch
    reach = np.maximum.accumulate(apart + stop)
    opens = np.concatenate([[True], (apart + start)[1:] > reach[:-1]])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(group)) - 1
    return group[first], start[first], (reach - apart)[last]


def as_bands(table: Table) -> tuple[Band, ...]:
    return tuple(map(Band._make, table.tolist()))


def bands_by_group(bands: Table, group: Ints) -> dict[int, tuple[Band, ...]]:
    """The bands of each group, joined into as few as possible."""
    bands, group = tables.coalesce_grouped(bands, group)
    cuts = np.flatnonzero(np.diff(group)) + 1
    parts = zip(np.split(bands, cuts), np.split(group, cuts), strict=True)
    return {int(g[0]): as_bands(b) for b, g in parts if len(g)}
