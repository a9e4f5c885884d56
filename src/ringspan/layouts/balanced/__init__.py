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

With ``per_node``, the ring is first shared among nodes and then, within each node, among its ranks. A cut within a node
separates keys that stay in the node, so few keys cross nodes::

    2 nodes of 2 ranks      [------ node 0 ------)[------ node 1 ------)      the cheapest cuts are between nodes
                            [-rank 0-)[-rank 1-)  [-rank 2-)[-rank 3-)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringspan.errors import LayoutError
from ringspan.layouts.balanced.cuts import Goal, Resolution, best_interval, nearest_interval
from ringspan.layouts.balanced.dealing import deal, shared_documents, shared_first
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

# Within a node, whose work may exceed the mean as well, the work of a rank may exceed the mean of all by 1/55.
WITHIN_NODES = 55

# Chunks of documents that are dealt among the ranks of a node are not all cut at the best token. Then 1/50 is accepted.
AT_MOST = 50

# Intervals are first tried at this many places per rank's share.
PLACES = 8


def balanced(mask: Mask, world: int, *, block: int = 128, slack: int = 0, per_node: int | None = None) -> Layout:
    """Give each rank the interval across whose ends the fewest keys are visible, alone or with the heaviest document
    that fits.

    Token counts differ by at most one. With ``slack`` they may be up to that many tokens above or below the share, if
    this saves a cut. Documents are cut at multiples of ``block`` if the work allows it. With ``per_node``, tokens and
    work are shared among nodes of that many ranks first, and then within each. Without it, ranks that share documents
    get neighbouring numbers, so that most of them share a node. Without slack the balance is never worse than that of
    contiguous, nor than that of zigzag if zigzag shares the tokens as evenly; with ``per_node`` this holds unless the
    balance is at most 1.02.

    >>> from ringspan import documents
    >>> print(balanced(documents([6, 3, 3]), 2).ascii())
    rank 0: [0,4) [10,12)
    rank 1: [4,10)
    """
    world = check_world(world)
    n, block, slack = mask.lengths[0], _count("block", block, 1), _count("slack", slack, 0)
    per_node = world if per_node is None else _count("per_node", per_node, 1, "ranks")
    fair = mask.area // world
    among_nodes = Limits(1, max(n // world - slack, 0), -(-n // world) + slack, fair, fair + max(fair // TOLERANCE, 1))
    limits = among_nodes if per_node >= world else among_nodes._replace(most_work=fair + max(fair // WITHIN_NODES, 1))
    resolution = _resolution(n // world, block)
    ring = _documents(mask, resolution.block)
    nodes = [min(per_node, world - first) for first in range(0, world, per_node)]
    parts = [among_nodes.times(ranks) for ranks in nodes]
    of_nodes = [*zip(nodes, _share_among(ring, parts, _resolution(n // len(nodes), block)), strict=True)]
    name = f"balanced(per_node={per_node})" if len(nodes) > 1 else "balanced"
    if len(nodes) > 1:
        cuts = _cuts(mask)
        # First with documents that are dealt among the ranks of a node, then without.
        for bounds, most_work in ((cuts, fair + fair // AT_MOST), (cuts[:0], limits.most_work)):
            made = (_within_node(ring.profile, bounds, *pieces, limits.times(ranks), resolution) for ranks, pieces in of_nodes)
            solved = Layout([spans for of_node in made for spans in of_node], length=n, name=name)
            if int(areas(mask, solved).max(initial=0)) <= most_work:
                return solved
        return solved if slack else _best(mask, solved)
    solved = Layout(sorted(_spans(*pieces) for pieces in _share_among(ring, [limits] * world, resolution)), name=name)
    best = solved if slack else _best(mask, solved)
    has_documents = mask.lengths[0] == mask.lengths[1] and len(mask.documents()) > 2
    return renumber_ranks(mask, best) if has_documents else best


class Limits(NamedTuple):
    """The limits of some ranks together: tokens from ``fewest`` to ``most``, work around ``fair`` and at most
    ``most_work``."""

    ranks: int
    fewest: int
    most: int
    fair: int
    most_work: int

    def times(self, count: int) -> Limits:
        return Limits(*(count * x for x in self))

    def less(self, tokens: int, work: int) -> Limits:
        """Return the limits for the rest, if the ranks already have this many tokens and this much work."""
        return Limits(self.ranks, self.fewest - tokens, self.most - tokens, self.fair - work, self.most_work - work)


def _share_among(ring: PieceRing, parts: Sequence[Limits], resolution: Resolution) -> Iterator[tuple[Ints, Ints]]:
    """Yield the starts and stops of the pieces of each part of the ring."""
    left = Limits(*map(sum, zip(*parts, strict=True)))
    for limits in parts:
        ranks = left.ranks
        left = Limits(*(x - y for x, y in zip(left, limits, strict=True)))
        fewest, most = max(limits.fewest, ring.tokens - left.most), min(limits.most, ring.tokens - left.fewest)
        work = ring.work * limits.ranks // ranks
        goal = Goal(
            fewest=fewest,
            tokens=max(min(ring.tokens * limits.ranks // ranks, most), fewest),
            most=most,
            least_work=max(min(work, 2 * limits.fair - limits.most_work), ring.work - left.most_work),
            work=work,
            most_work=limits.most_work,
        )
        start, stop, ring = _share(ring, goal, resolution)
        yield start, stop


def _within_node(
    profile: WorkProfile, cuts: Ints, start: Ints, stop: Ints, limits: Limits, resolution: Resolution
) -> list[list[tuple[int, int]]]:
    """Return the spans of each rank of a node that has these pieces: first its part of the documents that other nodes
    have, too, and then of all others. ``limits`` are those of the node."""
    ranks, shared = limits.ranks, shared_documents(cuts, start, stop)
    held, start, stop = deal(cuts, start, stop, ranks)
    each = Limits(*(x // ranks for x in limits))
    parts = []
    for spans in held:
        ends = np.array(spans, dtype=np.int64).reshape(-1, 2)
        work = profile.work_before(ends[:, 1]) - profile.work_before(ends[:, 0])
        parts.append(each.less(int((ends[:, 1] - ends[:, 0]).sum()), int(work.sum())))
    others = _share_among(PieceRing.of(profile, start, stop), parts, resolution) if len(start) else [(start, stop)] * ranks
    both = [(np.array(spans, dtype=np.int64).reshape(-1, 2), *rest) for spans, rest in zip(held, others, strict=True)]
    of_ranks = sorted(_spans(np.append(first[:, 0], low), np.append(first[:, 1], high)) for first, low, high in both)
    return [shared_first(spans, shared) for spans in of_ranks]


def _resolution(share: int, block: int) -> Resolution:
    step = max(1, share // PLACES)
    return Resolution(block=min(block, -(-step // 2)), step=step)


def _documents(mask: Mask, block: int) -> PieceRing:
    """Return the documents of the mask as a ring. Documents that begin in the same block of the sequence are one piece,
    since separating many tiny documents takes time and gains nothing."""
    cuts = _cuts(mask)
    last_in_block = np.append(cuts[1:] // block != cuts[:-1] // block, True)
    last_in_block[0] = True
    cuts = cuts[last_in_block]
    return PieceRing.of(WorkProfile(mask), cuts[:-1], cuts[1:])


def _cuts(mask: Mask) -> Ints:
    """Return the bounds of the documents. If queries and keys are of different sequences, there is one."""
    n, keys = mask.lengths
    return mask.documents() if n == keys else np.unique(np.array([0, n], dtype=np.int64))


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
    return solved if best is solved else Layout(best.spans, name=solved.name)


def _count(what: str, value: Any, least: int, of: str = "tokens") -> int:
    try:
        n = operator.index(value)
    except TypeError:
        n = least - 1
    if n < least:
        raise LayoutError(f"balanced: {what} must be an integer number of {of}, at least {least}; got {value!r}")
    return n
