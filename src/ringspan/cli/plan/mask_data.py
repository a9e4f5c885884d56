"""The data of the mask that the page draws and zooms into: bands and pieces, which have no resolution."""

from __future__ import annotations

from typing import Any

import numpy as np

import ringspan as rs
from ringspan.cli.plan.picture import MAX_CELLS_PER_SIDE, Ints, picture
from ringspan.layouts import Layout, areas

# A mask of more bands, or a layout of more pieces, is drawn in cells, because the page would have many megabytes.
MAX_BANDS = 50_000


def mask_data(mask: rs.Mask, q_layout: Layout, kv_layout: Layout, most: int = MAX_BANDS) -> dict[str, Any]:
    """Return bands, the pieces of both layouts, the area of each rank, and a note if they are only the cells of a
    picture."""
    bands, q_pieces, k_pieces = mask.table, _pieces(q_layout), _pieces(kv_layout)
    note = ""
    counted = {"bands": len(bands), "pieces of queries": len(q_pieces), "pieces of keys": len(k_pieces)}
    if max(counted.values()) > most:
        bands, q_pieces, k_pieces = _cells(mask, q_layout, kv_layout)
        many = ", ".join(f"{n:,} {what}" for what, n in counted.items() if n > most)
        note = (
            f"There are {many}. The page has a picture of {MAX_CELLS_PER_SIDE} × {MAX_CELLS_PER_SIDE} cells instead: "
            "a closer view shows cells, not tokens."
        )
    return {
        "bands": bands.tolist(),
        "q_pieces": q_pieces.tolist(),
        "k_pieces": k_pieces.tolist(),
        "areas": areas(mask, q_layout).tolist(),
        "note": note,
    }


def _pieces(layout: Layout) -> Ints:
    """Return a row (owner, start, size, step) for each piece."""
    p = layout.pieces
    return np.stack([p.owner, p.start, p.size, p.step], axis=1)


def _cells(mask: rs.Mask, q_layout: Layout, kv_layout: Layout) -> tuple[Ints, Ints, Ints]:
    """Return the visible cells of a picture as bands, and the owners of its rows and columns as pieces."""
    drawn = picture(mask, q_layout, kv_layout)
    (q_len, k_len), runs = mask.lengths, drawn.runs
    q_cuts, k_cuts = _cuts(q_len, len(drawn.query)), _cuts(k_len, len(drawn.key))
    q0, q1, k0, k1 = q_cuts[runs.row], q_cuts[runs.row + 1], k_cuts[runs.start], k_cuts[runs.stop]
    any_offset = np.full_like(q0, q_len + k_len)
    return (
        np.stack([q0, q1, k0, k1, -any_offset, any_offset], axis=1),
        _cell_pieces(drawn.q_owner, q_cuts),
        _cell_pieces(drawn.k_owner, k_cuts),
    )


def _cuts(length: int, cells: int) -> Ints:
    """Return where the cells begin, and the end of the last."""
    return -(-np.arange(cells + 1, dtype=np.int64) * length // max(1, cells))


def _cell_pieces(owner: Ints, cuts: Ints) -> Ints:
    return np.stack([owner, cuts[:-1], np.diff(cuts), np.ones_like(owner)], axis=1)
