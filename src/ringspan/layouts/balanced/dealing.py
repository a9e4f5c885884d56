"""Share the documents that several nodes have among all ranks of a node.

The keys of such a document cross between nodes. Each rank sends its own keys over its own port, so all ranks of a node
should have an equal part of them. Each contiguous part of a document is cut into two chunks for each rank, which are
dealt as in zigzag: ranks get equal tokens, and equal work if the work grows evenly from row to row::

    a document on two nodes of two ranks     |            node 0             |            node 1             |
                                             | rank 0 | rank 1 rank 1 | rank 0 | rank 2 | rank 3 rank 3 | rank 2 |
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ringspan.layouts.balanced.order import Spans
from ringspan.layouts.layout import Ints

# Parts of documents with fewer tokens per rank than this are not dealt: their keys are few.
FEWEST_DEALT = 128


class Dealt(NamedTuple):
    """The spans that each rank of a node gets, and the pieces of the node that are left."""

    held: list[Spans]
    start: Ints
    stop: Ints


def deal(cuts: Ints, start: Ints, stop: Ints, ranks: int) -> Dealt:
    """Deal the parts of the documents that reach beyond the pieces ``[start, stop)`` of a node among its ranks.

    ``cuts`` are the bounds of all documents. Numbers of tokens differ by at most one.

    >>> dealt = deal(np.array([0, 1600, 2000]), np.array([800, 1600]), np.array([1600, 2000]), 2)
    >>> dealt.held, dealt.start.tolist(), dealt.stop.tolist()
    ([[(800, 1000), (1400, 1600)], [(1000, 1200), (1200, 1400)]], [1600], [2000])
    """
    order = np.argsort(start)
    start, stop = start[order], stop[order]
    held: list[Spans] = [[] for _ in range(ranks)]
    left: Spans = []
    extra = 0  # the rank that gets the next token that cannot be shared
    shared = shared_documents(cuts, start, stop)
    for first, last in zip(start.tolist(), stop.tolist(), strict=True):
        low = first
        for part in _overlaps(first, last, shared):
            if part[1] - part[0] < ranks * FEWEST_DEALT:
                continue
            if low < part[0]:
                left.append((low, part[0]))
            extra = _zigzag(*part, held, extra)
            low = part[1]
        if low < last:
            left.append((low, last))
    ends = np.array(left, dtype=np.int64).reshape(-1, 2)
    return Dealt(held, ends[:, 0], ends[:, 1])


def _overlaps(first: int, last: int, spans: Spans) -> Spans:
    """Return the parts of ``[first, last)`` in spans that are in order and do not overlap each other."""
    found: Spans = []
    for i in range(max(0, bisect_right(spans, (first, first)) - 1), len(spans)):
        low, high = spans[i]
        if low >= last:
            break
        if high > first:
            found.append((max(first, low), min(last, high)))
    return found


def shared_documents(cuts: Ints, start: Ints, stop: Ints) -> Spans:
    """Return the documents of which only a part is in the pieces, in order."""
    if not len(cuts) or not len(start):
        return []
    order = np.argsort(start)
    start, stop = start[order], stop[order]
    size = stop - start
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(size)])
    piece = np.maximum(start.searchsorted(cuts, side="right") - 1, 0)
    inside = before[piece] + np.clip(cuts - start[piece], 0, size[piece])
    held = np.diff(inside)
    shared = np.flatnonzero((held > 0) & (held < np.diff(cuts)))
    return list(zip(cuts[shared].tolist(), cuts[shared + 1].tolist(), strict=True))


def _zigzag(first: int, last: int, held: list[Spans], extra: int) -> int:
    """Deal a range of tokens, and return the rank after the last one that got a token more."""
    ranks = len(held)
    share, more = divmod(last - first, ranks)
    counts = [share + ((rank - extra) % ranks < more) for rank in range(ranks)]
    low, high = first, last
    for rank, count in enumerate(counts):
        half = (count + 1) // 2
        held[rank] += [(low, low + half), (high - (count - half), high)]
        low, high = low + half, high - (count - half)
    return (extra + more) % ranks
