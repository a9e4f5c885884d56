"""Cut documents that are too large for a node, so that their keys are sent to few nodes, by all of these equally.

Each such document is cut from its end. Each *chunk* has as much work as a node can take if the rest of its tokens are
*light* documents, which have less work for each token than a node has on average. The beginning of the document is
shared like the documents that are not cut::

    document     [---- beginning ----)[-- chunk 2 --)[- chunk 1 -)[chunk 0)     equal work: later rows see more keys

The first keys are sent to every node that has later rows. If a document is on many nodes, the node with the first keys
would send several times as many rows as any node receives. Then the beginning is not left to one node, but *dealt*:
each node of the document gets a slice of it besides a chunk. A node needs all keys before its chunk anyhow, so slices
need no further keys. Their sizes are such that all nodes send about equally many rows::

    document     [0)[ 1 )[  2  )[   3   )[------ node 0 ------)[--- node 1 ---)[-- node 2 --)[- node 3 -)
                 --- the beginning ------
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ringspan.layouts.balanced.order import Spans
from ringspan.layouts.balanced.ring import PieceRings
from ringspan.layouts.layout import Ints

# The work per token of the light documents depends on how many of them are needed, and their number on the work per
# token. Both are computed in turn, this many times. So are the sizes of slices and chunks.
ROUNDS = 4

# A beginning is dealt if a node would send more than 5/4 of the rows that a node receives. Less is not worth the rows
# that equal parts send in addition.
ENOUGH_TO_DEAL = 5, 4

# A document is put on one node fewer if each of its nodes then exceeds its share of the work by at most 1/1000. If all
# other documents are light, this document has all the extra work, and rounding errors would ask for one node more than
# there are.
ROUNDING = 1000

# A beginning has up to 12/16 of the tokens of its document.
PARTS, MOST_PARTS = 16, 12


class LongParts(NamedTuple):
    """The parts of long documents: ``held`` are the spans of each node, one document each, and ``left`` is the end of
    what is left of a document, by its number in the ring."""

    held: list[Spans]
    left: dict[int, int]


class _NodeWork(NamedTuple):
    """What a node has: ``tokens`` and ``work``, of which the tokens of light documents have ``density`` each."""

    tokens: int
    work: int
    density: float


class _Document(NamedTuple):
    """The rows at which a document may be cut, with its end, and the work before each."""

    rows: Ints
    before: Ints

    def spans(self, low: Ints, high: Ints) -> list[Spans]:
        """Return spans by the index of their first row and of their end, those that are not empty."""
        ends = zip(self.rows[low].tolist(), self.rows[high].tolist(), strict=True)
        return [[(start, stop)] if start < stop else [] for start, stop in ends]

    def sends_more_than_it_receives(self, chunks: list[Spans]) -> bool:
        """Return whether a node sends more rows than any node receives, if the document is cut into these chunks, the
        last one first."""
        starts = [start for ((start, _),) in reversed(chunks)]
        sent, received = self.crossing(np.array([0, *self.rows.searchsorted(starts), len(self.rows) - 1], dtype=np.int64))
        return int(sent.max()) * ENOUGH_TO_DEAL[1] > int(received.max()) * ENOUGH_TO_DEAL[0]

    def crossing(self, bounds: Ints) -> tuple[Ints, Ints]:
        """Return how many rows each chunk sends and receives, if every chunk is on another node.

        A chunk sees the keys from the first that its first row sees. Only keys before a chunk are counted, as of a
        causal document.
        """
        start, stop = self.rows[bounds[:-1]], self.rows[bounds[1:]]
        step = np.minimum(bounds[:-1], len(self.rows) - 2)
        keys = (self.before[step + 1] - self.before[step]) // np.maximum(self.rows[step + 1] - self.rows[step], 1)
        first = np.maximum(start - keys, self.rows[0])
        seen = np.maximum(stop[:, None] - np.maximum(start[:, None], first[None, :]), 0)
        is_later = np.triu(np.ones_like(seen), 1)
        return (seen * is_later).sum(axis=1), (seen * is_later).sum(axis=0)


def long_parts(ring: PieceRings, tokens: int, work: int, block: int, most: int, most_dealt: int) -> LongParts:
    """Return the parts of documents with more work than a node may have, for at most ``most`` nodes, or ``most_dealt``
    if a beginning is dealt.

    ``tokens`` and ``work`` are those of a node. Documents are cut at multiples of ``block``.
    """
    size, of_pieces = np.diff(ring.edge), np.diff(ring.work_at)
    long = np.flatnonzero(of_pieces > work)
    light = np.flatnonzero((of_pieces <= work) & (of_pieces * tokens < work * size))
    if not len(long) or not len(light):
        return LongParts([], {})
    light_tokens, light_work = np.cumsum(size[light]), np.cumsum(of_pieces[light])
    documents = []
    for piece in long.tolist():
        rows = np.append(np.arange(ring.start[piece], ring.stop[piece], block), ring.stop[piece])
        documents.append(_Document(rows, ring.profile.work_before(rows)))
    held: list[Spans] = []
    left: dict[int, int] = {}
    filled = 0
    for _ in range(ROUNDS):
        # Light documents are in the order of their work per token. The first ones are used, as many as are needed.
        last = min(int(light_tokens.searchsorted(filled)), len(light) - 1)
        node = _NodeWork(tokens, work, int(light_work[last]) / int(light_tokens[last]))
        held, left, filled = [], {}, 0
        for piece, document in zip(reversed(long.tolist()), reversed(documents), strict=True):
            free = int(light_tokens[-1]) - filled
            found = list(_from_end(document, node, most - len(held), free))
            if most_dealt and document.sends_more_than_it_receives(found):
                found = _deal(document, node, most_dealt - len(held), free) or found
            held += found
            filled += sum(tokens - _tokens(spans) for spans in found)
            if found:
                left[piece] = min(start for spans in found for start, _ in spans)
    return LongParts(held, left)


def _tokens(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def _from_end(document: _Document, node: _NodeWork, most: int, free: int) -> Iterator[Spans]:
    """Yield the chunks of a document, the last one first, of at most ``most`` nodes that need at most ``free`` tokens of
    light documents."""
    end, stop = len(document.rows) - 1, int(document.rows[-1])
    for _ in range(most):
        taken = stop - document.rows[:end]
        total = document.before[end] - document.before[:end] + node.density * (node.tokens - taken)
        fitting = np.flatnonzero(total <= node.work)
        if not len(fitting) or fitting[0] == 0 or taken[fitting[0]] > node.tokens:  # nothing fits, or all that is left
            return
        end = int(fitting[0])
        free -= node.tokens - int(taken[end])
        if free < 0:
            return
        start = int(document.rows[end])
        yield [(start, stop)]
        stop = start


def _deal(document: _Document, node: _NodeWork, most: int, free: int) -> list[Spans]:
    """Return the spans of each node of a document whose beginning is dealt, if this reduces the rows that a node sends;
    else nothing.

    It is on at most ``most`` nodes, and ``free`` is that of :func:`_from_end`. All nodes get equal work. The beginning
    is as short as it can be, so that no node sends more rows than one receives.
    """
    rows, before = document
    light = (node.density * (rows - rows[0])).astype(np.int64)
    # The work of the rows before, beyond that of as many tokens of light documents.
    extra = np.maximum.accumulate(np.maximum(before - before[0] - light, 0))
    spare_work = node.work + node.work // ROUNDING - int(node.density * node.tokens)
    count = -(-int(extra[-1]) // spare_work) if spare_work > 0 else most + 1
    if count < 2 or count > most or count * node.tokens - int(rows[-1] - rows[0]) > free:
        return []
    found: list[Spans] = []
    least = None
    for part in range(MOST_PARTS + 1):
        slices, chunks = _slices_and_chunks(document, extra, count, part * (len(rows) - 1) // PARTS)
        if (np.diff(chunks) < 0).any() or (np.diff(rows[slices]) + np.diff(rows[chunks])).max() > node.tokens:
            break
        sent, received = document.crossing(chunks)
        most_sent = int((sent + (count - 1) * np.diff(rows[slices])).max())
        if part and (least is None or most_sent < least):
            both = zip(document.spans(slices[:-1], slices[1:]), document.spans(chunks[:-1], chunks[1:]), strict=True)
            found = [[*a_slice, *chunk] for a_slice, chunk in both]
        least = most_sent if least is None else min(least, most_sent)
        if most_sent <= int((received + rows[slices[-1]] - rows[0] - np.diff(rows[slices])).max()):
            break
    return found


def _slices_and_chunks(document: _Document, extra: Ints, count: int, front: int) -> tuple[Ints, Ints]:
    """Return the bounds of ``count`` slices of the first ``front`` blocks, and those of the chunks of the rest, as
    indices of rows.

    A node gets the slice and the chunk with its number. Together they have an equal part of the work ``extra``. The
    slices, whose rows go to all other nodes, are shared so that all nodes send equally many rows.
    """
    slices = np.arange(count + 1) * front // count
    chunks = slices
    for _ in range(ROUNDS):
        shares = int(extra[-1]) // count - np.diff(extra[slices])
        chunks = np.concatenate([[front], extra.searchsorted(extra[front] + np.cumsum(shares))])
        chunks = np.minimum(chunks, len(document.rows) - 1)
        chunks[-1] = len(document.rows) - 1
        sent, _ = document.crossing(chunks)
        lacking = _up_to_level(sent, front * (count - 1) * int(document.rows[1] - document.rows[0]))
        slices = np.concatenate([[0], np.cumsum(lacking)]) * front // max(int(lacking.sum()), 1)
    return slices, chunks


def _up_to_level(filled: Ints, amount: int) -> Ints:
    """Share an amount so that those that have the least are made equal. Return what is added to each.

    >>> _up_to_level(np.array([5, 1, 2]), 5).tolist()
    [0, 3, 2]
    """
    low, high = 0, int(filled.max(initial=0)) + amount
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if int(np.maximum(level - filled, 0).sum()) <= amount else (low, level - 1)
    return np.maximum(low - filled, 0)
