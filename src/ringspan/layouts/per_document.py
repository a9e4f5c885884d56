"""Zigzag within every document, for packed sequences of a few long documents."""

from __future__ import annotations

import numpy as np

from ringspan.errors import LayoutError
from ringspan.layouts.layout import Layout, check_world
from ringspan.masks import Mask


def per_document(mask: Mask, world: int) -> Layout:
    """Split each document into ``2 * world`` chunks. A rank gets one from the front and one from the back of each.

    The documents are those of :meth:`Mask.documents`. Where a length is not divisible, the remaining tokens go to
    chunks in turn, continued from document to document, so that no rank gets them all.

    >>> from ringspan import documents
    >>> print(per_document(documents([4, 6]), 2).ascii())
    rank 0: [0,1) [3,4) [4,6) [9,10)
    rank 1: [1,2) [2,3) [6,8) [8,9)
    """
    world = check_world(world)
    if mask.lengths[0] != mask.lengths[1]:
        raise LayoutError(
            "per_document needs one sequence for queries and keys; this mask has "
            f"{mask.lengths[0]} and {mask.lengths[1]} tokens. Use another layout, or kv_layout= for the keys"
        )
    chunks = 2 * world
    cuts = mask.documents()
    size, rest = np.divmod(np.diff(cuts), chunks)
    turn = (np.cumsum(rest) - rest) % chunks
    gets_one_more = (np.arange(chunks)[None, :] - turn[:, None]) % chunks < rest[:, None]
    stop = cuts[:-1, None] + np.cumsum(size[:, None] + gets_one_more, axis=1)
    start = np.concatenate([cuts[:-1, None], stop[:, :-1]], axis=1)
    spans: list[list[tuple[int, int]]] = []
    for r in range(world):
        pair = [r, chunks - 1 - r]
        spans.append(list(zip(start[:, pair].ravel().tolist(), stop[:, pair].ravel().tolist(), strict=True)))
    return Layout(spans, name="per_document")
