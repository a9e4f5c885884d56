"""One span per rank: the fewest bytes for local masks, but poor balance for causal ones."""

from __future__ import annotations

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts.layout import Layout, check_world, even_cuts
from ringspan.masks import Mask


def contiguous(mask: Mask, world: int) -> Layout:
    """Split the sequence into equal spans, one per rank, in order.

    >>> from ringspan import full
    >>> print(contiguous(full(8), 3).ascii())
    rank 0: [0,2)
    rank 1: [2,5)
    rank 2: [5,8)
    """
    return _contiguous(mask.lengths[0], check_world(world))


@cache_by_digest(64, plain=True)
def _contiguous(length: int, world: int) -> Layout:
    cuts = even_cuts(length, world)
    return Layout([[(cuts[r], cuts[r + 1])] for r in range(world)], name="contiguous")
