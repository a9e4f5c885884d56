"""Which rank gets which number: ranks that see each other's keys side by side, since a node is a run of ranks."""

from __future__ import annotations

import numpy as np

from ringspan.layouts.cut import cut
from ringspan.layouts.layout import Ints, Layout
from ringspan.masks import Mask
from ringspan.masks.table import K0, K1


def side_by_side(mask: Mask, layout: Layout) -> Layout:
    """The same shares under other numbers: after each rank the one that exchanges most with those just before.

    The first stays the first. What lies further back counts less, by a quarter for each number in between.
    """
    links = _links(mask, layout)
    order = [0] if layout.world else []
    free = np.ones(layout.world, dtype=np.bool_)
    pull = np.zeros(layout.world, dtype=np.int64)
    while len(order) < layout.world:
        free[order[-1]] = False
        pull += links[order[-1]] - pull // 4
        best = int(np.where(free, pull, -1).argmax())
        if not pull[best]:  # nobody left has to do with those before: go on where the fewest have to do with each other
            best = int(np.where(free, links.sum(axis=1), np.iinfo(np.int64).max).argmin())
        order.append(best)
    return Layout([layout.spans[rank] for rank in order], name=layout.name)


def _links(mask: Mask, layout: Layout) -> Ints:
    """How many rows two ranks have to exchange, both ways together."""
    tiles = cut(mask, layout.pieces, layout.pieces)
    links = np.zeros((layout.world, layout.world), dtype=np.int64)
    np.add.at(links, (tiles.q_rank, tiles.k_rank), tiles.bands[:, K1] - tiles.bands[:, K0])
    links += links.T
    np.fill_diagonal(links, 0)
    return links
