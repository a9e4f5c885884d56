"""Tokens assigned to ranks in turn: each rank has every ``world``-th token."""

from __future__ import annotations

from ringspan.layouts.layout import Layout, check_world
from ringspan.masks import Mask


def striped(mask: Mask, world: int) -> Layout:
    """Assign tokens in turn: rank r owns tokens ``r, r + world, r + 2 * world, …``.

    A band stays a band when queries and keys are subsampled by the same step, so each pair of ranks has one band for
    each band of the mask, however long the sequence.

    >>> from ringspan import causal
    >>> print(striped(causal(8), 3).ascii())
    rank 0: [0,8):3
    rank 1: [1,8):3
    rank 2: [2,8):3
    """
    world = check_world(world)
    n = mask.lengths[0]
    return Layout([[(min(r, n), n, world)] for r in range(world)], name="striped")
