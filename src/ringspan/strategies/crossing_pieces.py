"""Pieces of the rows that cross between nodes, and the work that is done while they are in flight.

:mod:`ringspan.strategies.hierarchical` sends them in a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts import Layout, cut
from ringspan.masks import Band, Mask
from ringspan.masks.table import K0, K1, Q0, Q1, area, tighten
from ringspan.plans.problem import Ints, as_bands, estimated_tiles, union
from ringspan.strategies.nodes import Nodes, by_node

Shares = NDArray[np.float64]

MAX_NODE_TILES = 65536  # tiles of nodes with ranks, from which the rows that cross are found
UNKNOWN_CROSSING = 0.5  # the fraction of a rank's work with rows of other nodes, if there are too many tiles to count it
LEAST_WEIGHT = 0.1  # of the work of steps without rows of other nodes
ROWS = 128  # parts of a band begin at multiples of this, so that kernels compute whole tiles


class CrossingPieces(NamedTuple):
    """The pieces in which rows cross between nodes.

    ``bounds`` has the first row of each piece but the first, for each rank. ``layout`` is that of the keys, with its
    spans split at these rows. The rows of the ranks are the same. ``most_crossing`` is the largest fraction of a rank's
    work that is with rows of other nodes.
    """

    per_node: int
    bounds: Ints
    layout: Layout
    most_crossing: float

    @property
    def number(self) -> int:
        return self.bounds.shape[1] + 1

    def of(self, owner: Ints, row: Ints) -> Ints:
        """Return the piece in which each of these rows of these ranks crosses.

        The first rows of a rank are seen by most others. So the ranks of different nodes begin with different pieces:
        each piece has rows that many ranks see, and rows that few see.
        """
        pieces: Ints = ((self.bounds[owner] <= row[:, None]).sum(axis=1) + owner // self.per_node) % self.number
        return pieces


@cache_by_digest(16)
def make_pieces(mask: Mask, q_layout: Layout, kv_layout: Layout, nodes: Nodes, count: int) -> CrossingPieces:
    """Split the rows of each rank that cross to other nodes into ``count`` pieces of equal size."""
    bounds = np.zeros((kv_layout.world, count - 1), dtype=np.int64)
    if count == 1:
        return CrossingPieces(nodes.per_node, bounds, kv_layout, UNKNOWN_CROSSING)
    owner, start, stop = _crossing_rows(mask, q_layout, kv_layout, nodes)
    for rank in np.unique(owner).tolist():
        first, last = owner.searchsorted((rank, rank + 1))
        size = stop[first:last] - start[first:last]
        before = np.cumsum(size) - size
        at = np.arange(1, count) * int(size.sum()) // count
        range_of = before.searchsorted(at, side="right") - 1
        bounds[rank] = start[first:last][range_of] + at - before[range_of]
    spans: list[list[tuple[int, int, int]]] = []
    for rank, of_rank in enumerate(kv_layout.spans):
        row, found = 0, []
        for span in of_rank:
            tokens = range(*span)
            cuts = sorted({bound - row for bound in bounds[rank].tolist() if 0 < bound - row < len(tokens)})
            parts = (tokens[a:b] for a, b in pairwise([0, *cuts, len(tokens)]))
            found += [(part.start, part.stop, part.step) for part in parts]
            row += len(tokens)
        spans.append(found)
    layout = Layout(spans, length=kv_layout.length, name=kv_layout.name)
    return CrossingPieces(nodes.per_node, bounds, layout, _most_crossing(mask, q_layout, kv_layout, nodes))


def _crossing_rows(mask: Mask, q_layout: Layout, kv_layout: Layout, nodes: Nodes) -> tuple[Ints, Ints, Ints]:
    """Return the ranges of rows (owner, start, stop) that any other node sees.

    For a mask with many tiles, which is most likely one long document, these are all rows.
    """
    queries = by_node(q_layout, nodes)
    if estimated_tiles(mask, queries, kv_layout) > MAX_NODE_TILES:
        owners = np.arange(kv_layout.world)
        return owners, np.zeros_like(owners), np.array(kv_layout.counts)
    tiles = cut(mask, queries.pieces, kv_layout.pieces)
    crosses = tiles.q_rank != tiles.k_rank // nodes.per_node
    return union(tiles.k_rank[crosses], tiles.bands[crosses, K0], tiles.bands[crosses, K1])


def _most_crossing(mask: Mask, q_layout: Layout, kv_layout: Layout, nodes: Nodes) -> float:
    """Return the largest fraction of a rank's work that is with rows of other nodes, of the ranks with at least half
    the mean work."""
    keys = by_node(kv_layout, nodes)
    if estimated_tiles(mask, q_layout, keys) > MAX_NODE_TILES:
        return UNKNOWN_CROSSING
    tiles = cut(mask, q_layout.pieces, keys.pieces)
    work = area(tiles.bands)
    crosses = tiles.k_rank != tiles.q_rank // nodes.per_node
    of_all = np.bincount(tiles.q_rank, weights=work, minlength=q_layout.world)
    crossing = np.bincount(tiles.q_rank, weights=work * crosses, minlength=q_layout.world)
    counted = (of_all > 0) & (2 * of_all >= of_all.mean())
    return float((crossing[counted] / of_all[counted]).max(initial=0.0))


def step_weights(pieces: int, steps: int, most_crossing: float) -> Shares:
    """Return how much work each step should have, relative to the others.

    Ranks wait for each other in every step, so all ranks should divide their work over the steps in the same way. The
    rank with the most work with rows of other nodes has no choice: this work is in steps 2 to ``pieces`` + 1, in which
    forwarded rows have arrived, and only the rest can be in the steps before and after::

        pieces=3, backward     step 0   1      2   3   4      5   6
        weight                 w        w      1   1   1      w   w      4 w : 3 = rest : work with rows of other nodes
    """
    inside = slice(2, pieces + 2)
    edges = steps - pieces
    ratio = (1 - most_crossing) / max(most_crossing, 1e-9) * pieces / edges
    weights = np.full(steps, min(1.0, max(LEAST_WEIGHT, ratio)))
    weights[inside] = 1.0
    return weights


def spread(
    own: tuple[Band, ...],
    near: tuple[Band, ...],
    busy: Sequence[int],
    weights: Shares,
    near_until: int,
) -> tuple[list[tuple[Band, ...]], list[tuple[Band, ...]]]:
    """Split the bands of the rank's own rows, and of those of its node, over the steps, so that the work of the steps
    is in proportion to the weights.

    ``busy`` is the work of each step with rows of other nodes. Rows of the node arrive in step 0, and are computed
    before the step ``near_until``.
    """
    own_area, near_area = (sum(band.area for band in bands) for bands in (own, near))
    share = _fill(np.array(busy, dtype=np.float64), own_area + near_area, weights)
    of_near, allowed = np.zeros_like(share), slice(1, near_until)
    of_near[allowed] = share[allowed]
    if of_near.sum() == 0:
        of_near[allowed] = 1
    of_near *= min(1.0, near_area / of_near.sum())
    return _split_by_area(own, np.maximum(share - of_near, 0)), _split_by_area(near, of_near)


def _fill(busy: Shares, work: int, weights: Shares) -> Shares:
    """Return how much of the work each step gets, so that the totals of all steps are about in proportion to the
    weights.

    The level up to which steps are filled is found by bisection.
    """
    low, high = 0.0, float(work + busy.sum()) / float(weights.min())
    for _ in range(50):
        level = (low + high) / 2
        low, high = (level, high) if np.maximum(level * weights - busy, 0).sum() < work else (low, level)
    return np.maximum(high * weights - busy, 0)


def _split_by_area(bands: tuple[Band, ...], shares: Shares) -> list[tuple[Band, ...]]:
    """Split bands into parts with these shares of their area, in the order of the bands and of their queries."""
    table = np.array(bands, dtype=np.int64).reshape(-1, 6)
    areas = area(table)
    total, wanted = areas.sum(), shares.sum()
    if not total or not wanted:
        return [bands if n == 0 else () for n in range(len(shares))]
    ends = np.cumsum(shares)[:-1] / wanted * total
    ends[np.flatnonzero(shares)[-1] :] = np.inf  # a part without a share gets nothing, whatever is rounded
    parts: list[list[Ints]] = [[] for _ in shares]
    before = 0
    for band, size in zip(table, areas.tolist(), strict=True):
        part, inside = int((ends <= before).sum()), ends[(ends > before) & (ends < before + size)]
        rows = _rows_at_area(band, inside - before) if len(inside) else []
        for n, (q0, q1) in enumerate(pairwise([int(band[Q0]), *rows, int(band[Q1])])):
            if q0 < q1:
                cut_band = band.copy()
                cut_band[[Q0, Q1]] = q0, q1
                parts[part + n].append(cut_band)
        before += size
    return [as_bands(tighten(np.array(part, dtype=np.int64).reshape(-1, 6))) for part in parts]


def _rows_at_area(band: Ints, areas: Shares) -> list[int]:
    """Return the queries up to which a band has about these areas, as multiples of ``ROWS``."""
    beginning = np.repeat(band[None], len(areas), axis=0)
    too_few, enough = np.full(len(areas), band[Q0]), np.full(len(areas), band[Q1])
    while (enough - too_few > 1).any():
        beginning[:, Q1] = np.maximum((too_few + enough) // 2, band[Q0] + 1)
        has_enough = area(tighten(beginning)) >= areas
        enough, too_few = np.where(has_enough, beginning[:, Q1], enough), np.where(has_enough, too_few, beginning[:, Q1])
    rows = enough - 1 + ROWS // 2
    bounds: list[int] = np.clip(rows // ROWS * ROWS, band[Q0], band[Q1]).tolist()
    return bounds
