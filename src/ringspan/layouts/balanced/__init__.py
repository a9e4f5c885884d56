"""The balanced layout: equal tokens, equal work, few pieces and few keys to fetch, for any mask.

The documents are arranged in a ring. An interval with one rank's share of the tokens is moved around the ring. Averaged
over all positions it holds one rank's share of the work, so at some position it holds exactly that share. This interval
is removed from the ring and assigned to one rank. The rest of the ring is shared in the same way. So every rank gets
its share of tokens and of work. Each interval makes at most two cuts, so the number of pieces exceeds that of documents
by at most two per rank.

::

    causal(8) on 2 ranks                    0 1 2 3 4 5 6 7 (0 1 2 …          token t is t + 1 pairs of work, 18 for each rank
    an interval of 4 tokens, 18 pairs           [-------)                     3 + 4 + 5 + 6
    the rest of the ring                    0 1         6 7 (0 1 …            1 + 2 + 7 + 8: zigzag

The ring begins with the document that has the least work per token and ends with the one that has the most. An interval
across the end takes the heavy part of a document that is too large for one rank, and light documents.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ringspan.errors import LayoutError
from ringspan.layouts.balanced.cuts import Goal, Resolution, best_interval, nearest_interval
from ringspan.layouts.balanced.renumber import renumber_ranks
from ringspan.layouts.balanced.ring import PieceRing
from ringspan.layouts.balanced.work import WorkProfile
from ringspan.layouts.contiguous import contiguous
from ringspan.layouts.cut import areas
from ringspan.layouts.layout import Ints, Layout, check_world
from ringspan.layouts.zigzag import zigzag
from ringspan.masks import Mask

# The work of a rank may exceed the mean by 1/80, to have a choice of cuts that cost little.
TOLERANCE = 80

# Intervals are first tried at this many places per rank's share.
PLACES = 8


def balanced(mask: Mask, world: int, *, block: int = 128, slack: int = 0) -> Layout:
    """Give each rank the interval across whose ends the fewest keys are visible, alone or with the heaviest document
    that fits.

    Token counts differ by at most one. With ``slack`` they may be up to that many tokens above or below the share, if
    this saves a cut. Documents are cut at multiples of ``block`` if the work allows it. Ranks that share documents get
    neighbouring numbers, so that most of them share a node. Without slack the balance is never worse than that of
    contiguous, nor than that of zigzag if zigzag shares the tokens as evenly.

    >>> from ringspan import documents
    >>> print(balanced(documents([6, 3, 3]), 2).ascii())
    rank 0: [0,4) [10,12)
    rank 1: [4,10)
    """
    world = check_world(world)
    n, block, slack = mask.lengths[0], _tokens("block", block, 1), _tokens("slack", slack, 0)
    fewest, most = max(n // world - slack, 0), -(-n // world) + slack
    fair = mask.area // world
    most_work = fair + max(fair // TOLERANCE, 1)
    step = max(1, n // world // PLACES)
    resolution = Resolution(block=min(block, -(-step // 2)), step=step)
    ring = _documents(mask, resolution.block)
    held = []
    for others in reversed(range(world)):
        work = ring.work // (others + 1)
        goal = Goal(
            fewest=max(fewest, ring.tokens - others * most),
            tokens=ring.tokens // (others + 1),
            most=min(most, ring.tokens - others * fewest),
            least_work=max(min(work, 2 * fair - most_work), ring.work - others * most_work),
            work=work,
            most_work=most_work,
        )
        start, stop, ring = _share(ring, goal, resolution)
        held.append(_spans(start, stop))
    solved = Layout(sorted(held), name="balanced")
    best = solved if slack else _best(mask, solved)
    has_documents = mask.lengths[0] == mask.lengths[1] and len(mask.documents()) > 2
    return renumber_ranks(mask, best) if has_documents else best


def _documents(mask: Mask, block: int) -> PieceRing:
    """Return the documents of the mask as a ring. Documents that begin in the same block of the sequence are one piece,
    since separating many tiny documents takes time and gains nothing."""
    n, keys = mask.lengths
    cuts = mask.documents() if n == keys else np.unique(np.array([0, n], dtype=np.int64))
    last_in_block = np.append(cuts[1:] // block != cuts[:-1] // block, True)
    last_in_block[0] = True
    cuts = cuts[last_in_block]
    return PieceRing.of(WorkProfile(mask), cuts[:-1], cuts[1:])


def _share(ring: PieceRing, goal: Goal, resolution: Resolution) -> tuple[Ints, Ints, PieceRing]:
    """Return the starts and stops of the pieces for one rank, and the ring that is left."""
    if goal.tokens in (0, ring.tokens):
        return ring.take(0, goal.tokens)
    interval = best_interval(ring, goal, resolution)
    size, work = np.diff(ring.edge), np.diff(ring.work_at)
    for piece in np.flatnonzero((size <= goal.tokens) & (work <= goal.most_work))[-1:].tolist():
        others = ring.without(piece)
        beside = best_interval(others, goal.less(int(size[piece]), int(work[piece])), resolution)
        if beside is not None and (interval is None or beside < interval):
            start, stop, rest = others.take(beside.place, beside.tokens)
            return np.append(start, ring.start[piece]), np.append(stop, ring.stop[piece]), rest
    interval = interval or nearest_interval(ring, goal, resolution)
    return ring.take(interval.place, interval.tokens)


def _spans(start: Ints, stop: Ints) -> list[tuple[int, int]]:
    """Return the pieces in the order of the sequence, adjacent ones joined."""
    spans: list[tuple[int, int]] = []
    for low, high in sorted(zip(start.tolist(), stop.tolist(), strict=True)):
        joins = bool(spans) and spans[-1][1] == low
        spans.append((spans.pop()[0] if joins else low, high))
    return spans


def _best(mask: Mask, solved: Layout) -> Layout:
    """Return the best balanced of the solved layout and the simple ones that share the tokens as evenly.

    A simple layout wins if the mask suits it, or if a rank has so few tokens that each of them matters.
    """
    simple = (layout(mask, solved.world) for layout in (contiguous, zigzag))
    even = [layout for layout in simple if max(layout.counts) - min(layout.counts) <= 1]
    best = min([solved, *even], key=lambda layout: int(areas(mask, layout).max()))
    return solved if best is solved else Layout(best.spans, name="balanced")


def _tokens(what: str, value: Any, least: int) -> int:
    try:
        n = operator.index(value)
    except TypeError:
        n = least - 1
    if n < least:
        raise LayoutError(f"balanced: {what} must be an integer number of tokens, at least {least}; got {value!r}")
    return n
