"""Every rank gets one early and one late chunk, which balances causal masks exactly."""

from __future__ import annotations

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts.layout import Layout, check_world, even_cuts
from ringspan.masks import Mask


def zigzag(mask: Mask, world: int) -> Layout:
    """Split the sequence into ``2 * world`` chunks. Rank r owns chunk r from the front and chunk r from the back.

    >>> from ringspan import causal
    >>> print(zigzag(causal(8), 2).ascii())
    rank 0: [0,2) [6,8)
    rank 1: [2,4) [4,6)
    """
    return _zigzag(mask.lengths[0], check_world(world))


@cache_by_digest(64, plain=True)
def _zigzag(length: int, world: int) -> Layout:
    cuts = even_cuts(length, 2 * world)
    return Layout([[(cuts[c], cuts[c + 1]) for c in (r, 2 * world - 1 - r)] for r in range(world)], name="zigzag")
