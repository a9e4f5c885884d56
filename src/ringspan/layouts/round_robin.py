"""Blocks assigned to ranks in turn, by descending work."""

from __future__ import annotations

import numpy as np

from ringspan.layouts.layout import Layout, check_world
from ringspan.masks import Mask

BLOCKS_PER_RANK = 16


def round_robin(mask: Mask, world: int) -> Layout:
    """Split the sequence into equal blocks, sort them by work, and assign them to ranks 0 1 2 … 2 1 0 0 1 2 ….

    The number of blocks, not their size, is fixed (16 per rank), so that the cost of planning does not grow with the
    sequence.

    >>> from ringspan import causal
    >>> print(round_robin(causal(8), 2).ascii())
    rank 0: [0,1) [3,5) [7,8)
    rank 1: [1,3) [5,7)
    """
    world = check_world(world)
    n = mask.lengths[0]
    blocks = max(1, min(n, BLOCKS_PER_RANK * world))
    cuts = np.arange(blocks + 1, dtype=np.int64) * n // blocks
    heaviest_first = np.argsort(-mask.work(cuts), kind="stable")
    turn = np.arange(blocks) % (2 * world)
    rank_of_turn = np.where(turn < world, turn, 2 * world - 1 - turn)
    owner = np.empty(blocks, dtype=np.int64)
    owner[heaviest_first] = rank_of_turn
    spans: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for block, rank in enumerate(owner.tolist()):
        start, stop = int(cuts[block]), int(cuts[block + 1])
        if spans[rank] and spans[rank][-1][1] == start:
            start = spans[rank].pop()[0]
        spans[rank].append((start, stop))
    return Layout(spans, name="round_robin")
