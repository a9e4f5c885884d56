"""One span per rank: the fewest bytes for local masks, but poor balance for causal ones."""

from __future__ import annotations

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
    world = check_world(world)
    cuts = even_cuts(mask.lengths[0], world)
    return Layout([[(cuts[r], cuts[r + 1])] for r in range(world)], name="contiguous")
