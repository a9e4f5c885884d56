"""Decide which documents a node holds as a whole.

Keys cross between nodes only if a document is on several nodes. So documents that fit into a node are assigned to nodes
as they are, the heaviest first, and only the lightest ones are left to fill the nodes up exactly::

    node 0    [--- document 0 ---)[- 4 -)[.....)     [.....) light documents, cut wherever tokens and work require it:
    node 1    [-- document 1 --)[-- 3 --)[.....)     few keys cross at their cuts
    node 2    [- document 2 -)[- 5 -)[- 6 -)[..)

If a document has more work than a node may have, no document is assigned as a whole (``long_documents.py``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringspan.layouts.layout import Ints

# The fraction of the tokens, in the lightest documents, that is not assigned as a whole: 1/20.
RESERVE = 20


def assign_whole(
    size: Ints, work: Ints, tokens: Sequence[int], fair: Sequence[int], most_work: Sequence[int]
) -> NDArray[np.int64]:
    """Return the node of each document, -1 for those that remain on the ring to fill the nodes up.

    ``size`` and ``work`` are those of the documents, in ascending order of work per token. ``tokens``, ``fair`` and
    ``most_work`` are the tokens of each node, its share of the work and its limit. With light documents of density d in
    the rest of its tokens, a node has the work d · tokens, plus ``work - d · size`` for each document. So these sums
    are balanced: each document is given to the node that lacks most, if it fits.

    >>> assign_whole(*np.array([[2, 3, 3, 4, 4], [1, 6, 6, 10, 10]]), [8, 8], [17, 17], [18, 18]).tolist()
    [-1, 0, 1, 0, 1]
    """
    node = np.full(len(size), -1)
    left = int(np.cumsum(size).searchsorted(int(size.sum()) // RESERVE)) + 1
    density = int(work[:left].sum()) / max(int(size[:left].sum()), 1)
    extra = work - density * size
    free, spare = [*tokens], [most - density * n for most, n in zip(most_work, tokens, strict=True)]
    heap = [(density * n - of_node, i) for i, (n, of_node) in enumerate(zip(tokens, fair, strict=True))]
    heapq.heapify(heap)
    heaviest_first = left + np.argsort(-extra[left:], kind="stable")
    for document, n, more in zip(
        heaviest_first.tolist(), size[heaviest_first].tolist(), extra[heaviest_first].tolist(), strict=True
    ):
        full = []
        while heap:
            lacking, i = heap[0]
            if n <= free[i] and more <= spare[i]:
                node[document] = i
                free[i], spare[i] = free[i] - n, spare[i] - more
                heapq.heapreplace(heap, (lacking + more, i))
                break
            full.append(heapq.heappop(heap))
        for entry in full:
            heapq.heappush(heap, entry)
    return node
