"""A mask as a small picture, computed from its bands: each row shows the keys of one query, at any length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import ringspan as rs
from ringspan.layouts import Layout
from ringspan.masks import table as tables
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1

Ints = NDArray[np.int64]

# In a longer sequence a cell stands for the token in its middle.
MAX_CELLS_PER_SIDE = 640


class CellRuns(NamedTuple):
    """Cells ``[start, stop)`` of a row that are visible through a band. One array for each field."""

    row: Ints
    start: Ints
    stop: Ints
    band: Ints


class Picture(NamedTuple):
    """The tokens that the rows and columns stand for, the ranks that own them, and the visible cells."""

    query: Ints
    key: Ints
    q_owner: Ints
    k_owner: Ints
    runs: CellRuns

    def seen(self) -> NDArray[np.bool_]:
        """Return the picture cell by cell."""
        edges = np.zeros((len(self.query), len(self.key) + 1), dtype=np.int64)
        np.add.at(edges, (self.runs.row, self.runs.start), 1)
        np.add.at(edges, (self.runs.row, self.runs.stop), -1)
        cells: NDArray[np.bool_] = np.cumsum(edges, axis=1)[:, :-1] > 0
        return cells


def picture(
    mask: rs.Mask,
    q_layout: Layout,
    kv_layout: Layout,
    most: int = MAX_CELLS_PER_SIDE,
    part: tuple[int, int] | None = None,
) -> Picture:
    """Draw a mask, or only the queries and keys of ``part``, from the first to before the second. A run narrower than a
    cell still gets one cell: a narrow window is drawn as a line.

    >>> layout = rs.Layout([[(0, 2)], [(2, 4)]])
    >>> picture(rs.causal(4), layout, layout).seen().astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    (q0, q1), (k0, k1) = ((0, n) if part is None else part for n in mask.lengths)
    query, key = q0 + _middles(q1 - q0, most), k0 + _middles(k1 - k0, most)
    row, band = tables.overlapping(query, query + 1, mask.table[:, Q0], mask.table[:, Q1])
    of_band, lo, hi = mask.table[band][:, [K0, K1]].clip(k0, k1), mask.table[band][:, LO], mask.table[band][:, HI]
    first, last = np.maximum(of_band[:, 0], query[row] + lo), np.minimum(of_band[:, 1] - 1, query[row] + hi)
    columns, k_len = max(1, len(key)), max(1, k1 - k0)
    start = (first - k0) * columns // k_len
    stop = np.maximum(-(-(last + 1 - k0) * columns // k_len), start + 1)
    seen = last >= first
    found = np.unique(np.stack([row, start, stop, band], axis=1)[seen], axis=0)
    # Many tiny documents make runs that cover the same cells: one of them is enough.
    _, kept = np.unique(found[:, :3], axis=0, return_index=True)
    return Picture(query, key, owners_of(q_layout, query), owners_of(kv_layout, key), CellRuns(*found[kept].T))


def owners_of(layout: Layout, token: Ints) -> Ints:
    """Return the rank that owns each of these tokens."""
    p = layout.pieces
    if (p.step[p.size > 1] > 1).any():
        behind = token[:, None] - p.start[None, :]
        held = (behind >= 0) & (behind % p.step == 0) & (behind < p.size * p.step)
        return p.owner[held.argmax(axis=1)]
    order = np.argsort(p.start)
    return p.owner[order[np.searchsorted(p.start[order], token, side="right") - 1]]


def _middles(length: int, most: int) -> Ints:
    """Return the token in the middle of each of at most ``most`` equal parts."""
    cells = min(length, most)
    return (2 * np.arange(cells, dtype=np.int64) + 1) * length // (2 * max(1, cells))
