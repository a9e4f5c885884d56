"""Decide which documents a node holds as a whole, and where documents that are too large for a node are cut.

Keys cross between nodes only if a document is on several nodes. So documents that fit into a node are assigned to nodes
as they are, the heaviest first, and only the lightest ones are left to fill the nodes up exactly::

    node 0    [--- document 0 ---)[- 4 -)[.....)     [.....) light documents, cut wherever tokens and work require it:
    node 1    [-- document 1 --)[-- 3 --)[.....)     few keys cross at their cuts
    node 2    [- document 2 -)[- 5 -)[- 6 -)[..)

If a document has more work than a node may have, no document is assigned as a whole. Instead, such documents are cut
from their ends. Each *chunk* has as much work as a node can take if the rest of its tokens are light documents. The
beginning of the document is shared like the documents that are not cut::

    document     [---- beginning ----)[-- chunk 2 --)[- chunk 1 -)[chunk 0)     equal work: later rows see more keys
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.layouts.balanced.ring import PieceRings
from ringspan.layouts.layout import Ints

# The fraction of the tokens, in the lightest documents, that is not assigned as a whole: 1/20.
RESERVE = 20

# The work per token of the light documents depends on how many of them are needed, and their number on the work per
# token. Both are computed in turn, this many times.
ROUNDS = 4


class Chunk(NamedTuple):
    """Rows of a document that is too large for a node. ``piece`` is the number of the document in the ring."""

    piece: int
    start: int
    stop: int


def long_chunks(ring: PieceRings, tokens: int, work: int, block: int, most: int) -> list[Chunk]:
    """Return at most ``most`` chunks of the documents with more work than a node may have, one for each node.

    ``tokens`` and ``work`` are those of a node. Documents are cut at multiples of ``block``.
    """
    size, of_pieces = np.diff(ring.edge), np.diff(ring.work_at)
    long = np.flatnonzero(of_pieces > work)
    light = np.flatnonzero((of_pieces <= work) & (of_pieces * tokens < work * size))
    if not len(long) or not len(light):
        return []
    light_tokens, light_work = np.cumsum(size[light]), np.cumsum(of_pieces[light])
    rows = [np.arange(ring.start[piece], ring.stop[piece], block) for piece in long.tolist()]
    before = [ring.profile.work_before(np.append(x, ring.stop[piece])) for x, piece in zip(rows, long.tolist(), strict=True)]
    chunks: list[Chunk] = []
    filled = 0
    for _ in range(ROUNDS):
        # Light documents are in the order of their work per token. The first ones are used, as many as are needed.
        last = min(int(light_tokens.searchsorted(filled)), len(light) - 1)
        density = int(light_work[last]) / int(light_tokens[last])
        chunks, filled = [], 0
        for i in reversed(range(len(long))):
            stop = int(ring.stop[long[i]])
            for start in _cut_from_end(rows[i], before[i], stop, tokens, work, density):
                free = tokens - (stop - start)
                if filled + free > light_tokens[-1] or len(chunks) == most:
                    break
                chunks.append(Chunk(int(long[i]), start, stop))
                filled, stop = filled + free, start
    return chunks


def _cut_from_end(rows: Ints, before: Ints, stop: int, tokens: int, work: int, density: float) -> list[int]:
    """Return the starts of the chunks of a document, the last chunk first, if the other tokens of their nodes have this
    work per token.

    ``before`` is the work before each of the rows, at which the document may be cut, and before its end.
    """
    starts: list[int] = []
    end = len(rows)
    while end > 0:
        taken = stop - rows[:end]
        total = before[end] - before[:end] + density * (tokens - taken)
        fitting = np.flatnonzero(total <= work)
        if not len(fitting) or fitting[0] == 0 or taken[fitting[0]] > tokens:  # nothing fits, or all that is left
            return starts
        end = int(fitting[0])
        stop = int(rows[end])
        starts.append(stop)
    return starts


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
