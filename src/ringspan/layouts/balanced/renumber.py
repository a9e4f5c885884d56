"""Number the ranks so that those which exchange keys are neighbours: a node is a range of ranks."""

from __future__ import annotations

import numpy as np

from ringspan.layouts.cut import cut
from ringspan.layouts.layout import Ints, Layout
from ringspan.masks import Mask
from ringspan.masks.table import K0, K1


def renumber_ranks(mask: Mask, layout: Layout) -> Layout:
    """Renumber the ranks of a layout: after each comes the rank that exchanges most with those just before it.

    Rank 0 keeps its number. An exchange with a rank further back counts less, by a quarter per position.
    """
    links = _links(mask, layout)
    order = [0] if layout.world else []
    free = np.ones(layout.world, dtype=np.bool_)
    pull = np.zeros(layout.world, dtype=np.int64)
    while len(order) < layout.world:
        free[order[-1]] = False
        pull += links[order[-1]] - pull // 4
        best = int(np.where(free, pull, -1).argmax())
        if not pull[best]:  # no exchange with earlier ranks: continue with the rank that exchanges least
            best = int(np.where(free, links.sum(axis=1), np.iinfo(np.int64).max).argmin())
        order.append(best)
    return layout.renumbered(order)


def _links(mask: Mask, layout: Layout) -> Ints:
    """Return how many rows each two ranks exchange, in both directions together."""
    tiles = cut(mask, layout.pieces, layout.pieces)
    links = np.zeros((layout.world, layout.world), dtype=np.int64)
    np.add.at(links, (tiles.q_rank, tiles.k_rank), tiles.bands[:, K1] - tiles.bands[:, K0])
    links += links.T
    np.fill_diagonal(links, 0)
    return links
