"""Intersect a mask with a query layout and a key layout. The result is bands in local rows of the ranks.

Bands are converted from global tokens to local rows only here. The cost is proportional to the number of overlapping
(span, band, span) triples. Exception: if query and key spans have different steps, strided spans are split into single
tokens, which costs O(tokens). The triples, the single tokens and their tiles are counted before they are made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.errors import LayoutError
from ringspan.layouts.layout import Ints, Layout, Pieces
from ringspan.layouts.work import work_profile
from ringspan.masks import Mask
from ringspan.masks import table as tables
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1, Table

# Pairs of spans and bands. A thousand documents striped over 128 ranks have 16,384,000, which take 3.6 GB.
MAX_PAIRS = tables.MAX_PAIRS
# The same, and single tokens, if spans with steps are split into single tokens: about 0.5 s and 150 MB.
MAX_SPLIT_PAIRS = 2**19


class Tiles(NamedTuple):
    """Band i relates local query rows of rank ``q_rank[i]`` to local key rows of rank ``k_rank[i]``."""

    q_rank: Ints
    k_rank: Ints
    bands: Table

    @property
    def area(self) -> Ints:
        return tables.area(self.bands)


def cut(mask: Mask, queries: Pieces, keys: Pieces) -> Tiles:
    """Return the bands between the given spans of queries and the given spans of keys."""
    given = len(queries.start) + len(keys.start)
    queries, keys = _same_step(queries, keys)
    most = MAX_PAIRS if len(queries.start) + len(keys.start) == given else MAX_SPLIT_PAIRS
    # Join query spans with bands, then the clipped bands with key spans.
    _check_pairs(mask, tables.count_overlapping(*queries.extent, mask.table[:, Q0], mask.table[:, Q1]), most)
    q, b = tables.overlapping(*queries.extent, mask.table[:, Q0], mask.table[:, Q1])
    band, kept = tables.tighten_indexed(_clip_queries(mask.table[b], queries, q))
    q = q[kept]
    _check_pairs(mask, tables.count_overlapping(band[:, K0], band[:, K1], *keys.extent), most)
    i, k = tables.overlapping(band[:, K0], band[:, K1], *keys.extent)
    q, band = q[i], band[i]
    local, kept = tables.tighten_indexed(_to_local_rows(band, queries, q, keys, k))
    return Tiles(queries.owner[q[kept]], keys.owner[k[kept]], local)


@cache_by_digest(64)
def areas(mask: Mask, layout: Layout) -> Ints:
    """Return the visible pairs per rank, if each rank computes the rows of its own queries."""
    if (layout.pieces.step[layout.pieces.size > 1] == 1).all():
        return _areas_of_spans(mask, layout)
    pieces, (q0, q1, k0, k1, lo, hi) = layout.pieces, mask.table.T
    _check_pairs(mask, tables.count_overlapping(*pieces.extent, q0, q1), MAX_PAIRS)
    i, j = tables.overlapping(*pieces.extent, q0, q1)
    start, step = pieces.start[i], pieces.step[i]
    # The queries of span i in band j are its tokens number first to last - 1.
    first = np.maximum(-((start - q0[j]) // step), 0)
    last = np.minimum(-((start - q1[j]) // step), pieces.size[i])

    def beyond(key: Ints) -> Ints:
        """Return the sum of ``max(0, query - key)`` over these queries."""
        begin = np.maximum(first, -((start - key) // step))
        count = np.maximum(last - begin, 0)
        return count * (start - key) + step * (count * (begin + last - 1) // 2)

    # Query q of a tight band sees the keys before q + hi + 1, less those from k1 on, before k0 and before q + lo.
    band = beyond(k0[j] - hi[j] - 1) - beyond(k1[j] - hi[j] - 1) - beyond(k0[j] - lo[j])
    total = np.zeros(layout.world, dtype=np.int64)
    np.add.at(total, pieces.owner[i], band)
    total.setflags(write=False)
    return total


def _areas_of_spans(mask: Mask, layout: Layout) -> Ints:
    """Return :func:`areas` for spans without steps, from the work before their first and after their last token."""
    start, stop = layout.pieces.extent
    after, before = work_profile(mask).work_before(np.concatenate([stop, start])).reshape(2, -1)
    total = np.zeros(layout.world, dtype=np.int64)
    np.add.at(total, layout.pieces.owner, after - before)
    total.setflags(write=False)
    return total


def balance(mask: Mask, layout: Layout) -> float:
    """Return the maximum over the mean of the pairs per rank: 1.0 is balanced, ``world`` is one rank with all the
    work."""
    per_rank = areas(mask, layout)
    return float(per_rank.max() * layout.world / per_rank.sum()) if per_rank.sum() else 1.0


def _check_pairs(mask: Mask, counts: Ints, most: int) -> None:
    """Raise if there are too many pairs to join."""
    if (count := int(counts.sum())) > most:
        split = "" if most == MAX_PAIRS else ", as spans with different steps are compared token by token"
        raise LayoutError(
            f"the spans of these layouts and the {len(mask):,} bands of {mask.name:.60} overlap in {count:,} places{split}; "
            f"at most {most:,} are possible: use one layout of fewer and longer spans for queries and keys, such as balanced"
        )


def _clip_queries(band: Table, queries: Pieces, q: Ints) -> Table:
    start, stop = queries.extent
    band = band.copy()
    band[:, Q0] = np.maximum(band[:, Q0], start[q])
    band[:, Q1] = np.minimum(band[:, Q1], stop[q])
    return band


def _to_local_rows(band: Table, queries: Pieces, q: Ints, keys: Pieces, k: Ints) -> Table:
    """Rewrite global bands in local rows: token ``start + i * step`` of a span is row ``at + i``.

    For query ``q_start + i * step`` and key ``k_start + j * step``, ``lo <= k - q <= hi`` becomes
    ``ceil((lo - shift) / step) <= j - i <= floor((hi - shift) / step)`` with ``shift = k_start - q_start``.
    """
    q_start, k_start, step = queries.start[q], keys.start[k], queries.step[q]
    local = _shifted(band, -q_start, -k_start)
    if (step > 1).any():
        local[:, :HI] = -(-local[:, :HI] // step[:, None])
        local[:, HI] //= step
    for first, end, size in ((Q0, Q1, queries.size[q]), (K0, K1, keys.size[k])):
        np.maximum(local[:, first], 0, out=local[:, first])
        np.minimum(local[:, end], size, out=local[:, end])
    return _shifted(local, queries.at[q], keys.at[k])


def _shifted(bands: Table, queries: Ints, keys: Ints) -> Table:
    """Return the bands with their queries and keys shifted."""
    shift = np.empty_like(bands)
    shift[:, Q0], shift[:, Q1], shift[:, K0], shift[:, K1] = queries, queries, keys, keys
    shift[:, LO] = shift[:, HI] = keys - queries
    shift += bands
    return shift


def _same_step(queries: Pieces, keys: Pieces) -> tuple[Pieces, Pieces]:
    """Give all pieces the same step: a band intersected with strided spans is again a band only if all steps are equal.

    Where they differ (a striped layout for the queries, a contiguous one for the keys), spans with steps are split into
    single tokens. This is exact, but costs O(tokens).
    """
    if (queries.step == 1).all() and (keys.step == 1).all():
        return queries, keys
    steps = np.unique(np.concatenate([queries.step[queries.size > 1], keys.step[keys.size > 1]]))
    if len(steps) <= 1:
        step = steps[0] if len(steps) else 1
        return queries._replace(step=np.full_like(queries.step, step)), keys._replace(step=np.full_like(keys.step, step))
    tokens = sum(int(np.where(p.step > 1, p.size, 1).sum()) for p in (queries, keys))
    if tokens > MAX_SPLIT_PAIRS:
        raise LayoutError(
            f"the spans of queries and keys have different steps ({', '.join(map(str, steps[:4]))}{', …' * (len(steps) > 4)}), "
            f"so {tokens:,} tokens must be compared one by one; at most {MAX_SPLIT_PAIRS:,} are possible: use one layout for "
            "queries and keys, with spans of one step"
        )
    return _split_strided(queries), _split_strided(keys)


def _split_strided(p: Pieces) -> Pieces:
    n = np.where(p.step > 1, p.size, 1)
    i = np.repeat(np.arange(len(n)), n)
    nth = np.arange(len(i)) - np.repeat(np.cumsum(n) - n, n)
    count = np.where(p.step[i] > 1, 1, p.size[i])
    return Pieces(p.owner[i], p.start[i] + nth * p.step[i], count, np.ones_like(count), p.at[i] + nth)
