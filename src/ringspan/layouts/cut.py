"""Cut a mask along layouts: the bands between the queries of some spans and the keys of others, in local rows of the ranks.

This is the only place where global tokens become local rows. It costs O(bands that overlap), never O(tokens).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts.layout import Ints, Layout, Pieces
from ringspan.masks import Mask
from ringspan.masks import table as tables
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1, Table


class Tiles(NamedTuple):
    """Bands in local rows: those of rank ``q_rank`` for queries, of rank ``k_rank`` for keys."""

    q_rank: Ints
    k_rank: Ints
    bands: Table

    @property
    def area(self) -> Ints:
        return tables.area(self.bands)


def cut(mask: Mask, queries: Pieces, keys: Pieces) -> Tiles:
    """The bands between the given pieces of queries and the given pieces of keys."""
    queries, keys = _same_step(queries, keys)
    # queries × bands that overlap them, then × keys that overlap the keys of these
    q, b = tables.overlapping(*queries.extent, mask.table[:, Q0], mask.table[:, Q1])
    band, kept = tables.tighten_indexed(_rows_within(mask.table[b], queries, q))
    q = q[kept]
    i, k = tables.overlapping(band[:, K0], band[:, K1], *keys.extent)
    q, band = q[i], band[i]
    local, kept = tables.tighten_indexed(_localise(band, queries, q, keys, k))
    return Tiles(queries.owner[q[kept]], keys.owner[k[kept]], local)


@cache_by_digest(64)
def areas(mask: Mask, layout: Layout) -> Ints:
    """How many pairs each rank computes when it owns the queries of its spans."""
    everything = Pieces(*(np.array([x], dtype=np.int64) for x in (0, 0, mask.lengths[1], 1, 0)))
    tiles = cut(mask, layout.pieces, everything)
    total = np.zeros(layout.world, dtype=np.int64)
    np.add.at(total, tiles.q_rank, tiles.area)
    total.setflags(write=False)
    return total


def balance(mask: Mask, layout: Layout) -> float:
    """The largest rank's share of the work over the mean share: 1.0 is perfect, ``world`` is one rank with all the work."""
    per_rank = areas(mask, layout)
    return float(per_rank.max() * layout.world / per_rank.sum()) if per_rank.sum() else 1.0


def _rows_within(band: Table, queries: Pieces, q: Ints) -> Table:
    start, stop = queries.extent
    band = band.copy()
    band[:, Q0] = np.maximum(band[:, Q0], start[q])
    band[:, Q1] = np.minimum(band[:, Q1], stop[q])
    return band


def _localise(band: Table, queries: Pieces, q: Ints, keys: Pieces, k: Ints) -> Table:
    """Rewrite global bands in local rows: query ``start + i * step`` is row ``at + i``.

    With ``lo <= k - q <= hi`` and equal steps, ``(lo - shift) / step <= j - i <= (hi - shift) / step``, where shift is the
    distance of the two starts.
    """
    q_start, k_start, step = queries.start[q], keys.start[k], queries.step[q]
    shift = k_start - q_start
    local = np.empty_like(band)
    local[:, Q0] = np.maximum(_ceil(band[:, Q0] - q_start, step), 0)
    local[:, Q1] = np.minimum(_ceil(band[:, Q1] - q_start, step), queries.size[q])
    local[:, K0] = np.maximum(_ceil(band[:, K0] - k_start, step), 0)
    local[:, K1] = np.minimum(_ceil(band[:, K1] - k_start, step), keys.size[k])
    local[:, LO] = _ceil(band[:, LO] - shift, step)
    local[:, HI] = (band[:, HI] - shift) // step
    q_at, k_at = queries.at[q], keys.at[k]
    return local + np.stack([q_at, q_at, k_at, k_at, k_at - q_at, k_at - q_at], axis=1)


def _ceil(a: Ints, step: Ints) -> Ints:
    return -(-a // step)


def _same_step(queries: Pieces, keys: Pieces) -> tuple[Pieces, Pieces]:
    """Give all pieces the same step: spans with steps cut bands into bands only if all steps are equal.

    Where they differ (a striped layout for the queries, a contiguous one for the keys) spans with steps are split into single
    tokens. This is exact, but costs O(tokens).
    """
    steps = np.unique(np.concatenate([queries.step[queries.size > 1], keys.step[keys.size > 1]]))
    if len(steps) <= 1:
        step = steps[0] if len(steps) else 1
        return queries._replace(step=np.full_like(queries.step, step)), keys._replace(step=np.full_like(keys.step, step))
    return _single_tokens(queries), _single_tokens(keys)


def _single_tokens(p: Pieces) -> Pieces:
    n = np.where(p.step > 1, p.size, 1)
    i = np.repeat(np.arange(len(n)), n)
    nth = np.arange(len(i)) - np.repeat(np.cumsum(n) - n, n)
    count = np.where(p.step[i] > 1, 1, p.size[i])
    return Pieces(p.owner[i], p.start[i] + nth * p.step[i], count, np.ones_like(count), p.at[i] + nth)
