"""The balanced layout: equal tokens, equal work, few pieces and few keys to fetch, for any mask.

The documents are arranged in a ring. An interval with one rank's share of the tokens is moved around the ring. Averaged
over all positions it holds one rank's share of the work, so at some position it holds exactly that share. This interval
is removed from the ring and assigned to one rank. The rest of the ring is shared in the same way. So every rank gets
its share of tokens and of work. Each interval makes at most two cuts, so the number of pieces exceeds that of documents
by at most two per rank.

::

    causal(8) on 2 ranks                    0 1 2 3 4 5 6 7 (0 1 2 …      token t has t + 1 pairs, each rank 18
    an interval of 4 tokens, 18 pairs           [-------)                 3 + 4 + 5 + 6
    the rest of the ring                    0 1         6 7 (0 1 …        1 + 2 + 7 + 8: zigzag

The ring begins with the document that has the least work per token and ends with the one that has the most. An interval
across the end takes the heavy part of a document that is too large for one rank, and light documents.

With ``per_node``, the ring is first shared among nodes and then, within each node, among its ranks. A cut within a node
separates keys that stay in the node, so few keys cross nodes::

    2 nodes of 2 ranks      [------ node 0 ------)[------ node 1 ------)      the cheapest cuts are between nodes
                            [-rank 0-)[-rank 1-)  [-rank 2-)[-rank 3-)

Before that, nodes get whole documents (``whole_documents.py``), or parts of long ones (``long_documents.py``), and the
ring has the rest. The ranks of a node get equal parts of the documents that other nodes have, too (``dealing.py``).
On a rank, documents are in the order in which kernels compute them fastest (``order.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringspan.errors import LayoutError
from ringspan.layouts.balanced.cuts import Goal, Resolution, RingInterval, best_intervals, nearest_interval
from ringspan.layouts.balanced.dealing import deal
from ringspan.layouts.balanced.long_documents import long_parts
from ringspan.layouts.balanced.order import Spans, in_launch_order
from ringspan.layouts.balanced.renumber import renumber_ranks
from ringspan.layouts.balanced.ring import PieceRings
from ringspan.layouts.balanced.whole_documents import assign_whole
from ringspan.layouts.contiguous import contiguous
from ringspan.layouts.cut import areas
from ringspan.layouts.layout import Ints, Layout, check_world
from ringspan.layouts.work import WorkProfile, work_profile
from ringspan.layouts.zigzag import zigzag
from ringspan.masks import Mask
from ringspan.masks.table import HI

# The work of a rank may exceed the mean by 1/80, to have a choice of cuts that cost little.
TOLERANCE = 80

# A node that holds whole documents cannot always get exactly its share of the work. It may exceed it by 1/75.
NODE_TOLERANCE = 75

# Within a node, whose work may exceed the mean as well, the work of a rank may exceed the mean of all ranks by 1/55.
TOLERANCE_IN_NODE = 55

# If documents are dealt among the ranks of a node, where they are cut does not depend on the work of other documents.
# Then the work of a rank may exceed the mean of all ranks by 1/50.
DEALT_TOLERANCE = 50

# Columns of a goal.
TOKENS, MOST_WORK = Goal._fields.index("tokens"), Goal._fields.index("most_work")

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
    rank 0: [10,12) [0,4)
    rank 1: [4,10)
    """
    world = check_world(world)
    n, block, slack = mask.lengths[0], _count("block", block, 1), _count("slack", slack, 0)
    per_node = world if per_node is None else _count("per_node", per_node, 1, "ranks")
    fair = mask.area // world
    limits = Limits(1, max(n // world - slack, 0), -(-n // world) + slack, fair, fair + max(fair // TOLERANCE, 1))
    if per_node < world:
        return _over_nodes(mask, world, per_node, limits, block, slack)
    resolution = _resolution(n // world, block)
    shares = _share_among(_documents(mask, resolution.block), [[limits] * world], resolution)[0]
    of_ranks = sorted(_joined([*zip(start.tolist(), stop.tolist(), strict=True)]) for start, stop in shares)
    solved = Layout(of_ranks if world == 1 else _ordered(mask, of_ranks, world), name="balanced")
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
        fewest = max(self.fewest - tokens, 0)  # tokens above the minimum must not count for other ranks
        return Limits(self.ranks, fewest, self.most - tokens, self.fair - work, self.most_work - work)


def _over_nodes(mask: Mask, world: int, per_node: int, limits: Limits, block: int, slack: int) -> Layout:
    """Do :func:`balanced` for several nodes. ``limits`` are those of a rank."""
    n = mask.lengths[0]
    resolution = _resolution(n // world, block)
    ring = _documents(mask, resolution.block)
    nodes = [min(per_node, world - first) for first in range(0, world, per_node)]
    pieces = _among_nodes(ring, [limits.times(ranks) for ranks in nodes], _resolution(n // len(nodes), block))
    in_node = limits._replace(most_work=limits.fair + max(limits.fair // TOLERANCE_IN_NODE, 1))
    cuts = _cuts(mask)
    # First with documents that are dealt among the ranks of a node, then without.
    for dealt, most_work in ((cuts, limits.fair + limits.fair // DEALT_TOLERANCE), (cuts[:0], in_node.most_work)):
        spans = _within_nodes(ring.profile, dealt, pieces, [in_node.times(ranks) for ranks in nodes], resolution)
        solved = Layout(_ordered(mask, spans, per_node), length=n, name=f"balanced(per_node={per_node})")
        if int(areas(mask, solved).max(initial=0)) <= most_work:
            return solved
    return solved if slack else _best(mask, solved)


def _share_among(rings: PieceRings, parts: Sequence[Sequence[Limits]], resolution: Resolution) -> list[list[tuple[Ints, Ints]]]:
    """Return, for each ring, the starts and stops of the pieces of each of its parts.

    The first parts of all rings are cut out together, then the second parts, and so on.
    """
    left = [Limits(*map(sum, zip(*of_ring, strict=True))) for of_ring in parts]
    shares: list[list[tuple[Ints, Ints]]] = [[] for _ in parts]
    for n in range(max(map(len, parts))):
        goals = []
        for i, (tokens, work) in enumerate(zip(rings.tokens.tolist(), rings.work.tolist(), strict=True)):
            if n < len(parts[i]):
                limits, before = parts[i][n], left[i]
                left[i] = Limits(*(x - y for x, y in zip(before, limits, strict=True)))
                goals.append(_goal(limits, left[i], before.ranks, tokens, work))
            else:
                goals.append(Goal(0, 0, 0, 0, 0, 0))
        taken, rings = _share(rings, goals, resolution)
        for i, pieces in enumerate(taken):
            shares[i].append(pieces)
    return [of_ring[: len(wanted)] for of_ring, wanted in zip(shares, parts, strict=True)]


def _among_nodes(ring: PieceRings, parts: Sequence[Limits], resolution: Resolution) -> list[tuple[Ints, Ints]]:
    """Return the starts and stops of the pieces of each node.

    Nodes first get what :func:`_held_first` gives them, and the rest of the ring fills them up. If this does not
    balance the work, the ring is shared as it is.
    """
    for held, stop in _held_first(ring, parts, resolution.block):
        rest = np.flatnonzero(stop > ring.start)
        others = PieceRings.of(ring.profile, np.zeros_like(rest), ring.start[rest], stop[rest], 1)
        pieces = _fill_up(others, parts, held, resolution)
        works = (int((ring.profile.work_before(high) - ring.profile.work_before(low)).sum()) for low, high in pieces)
        if all(of_node <= part.fair + part.fair // NODE_TOLERANCE for of_node, part in zip(works, parts, strict=True)):
            return pieces
    return _share_among(ring, [parts], resolution)[0]


def _held_first(ring: PieceRings, parts: Sequence[Limits], block: int) -> Iterator[tuple[list[Spans], Ints]]:
    """Yield the spans that nodes may get before the rest of the ring is shared, and for each document the end of what
    is left of it.

    If some documents have more work than a node may have, these are parts of them, first with beginnings that are dealt
    among nodes, then without. Else they are whole documents.
    """
    size, work = np.diff(ring.edge), np.diff(ring.work_at)
    # With more tokens than its share, a node could leave too few for the others.
    shares = [int(size.sum()) * part.ranks // sum(part.ranks for part in parts) for part in parts]
    cut: list[list[Spans]] = []
    # Only the last node may have fewer ranks. What is left of a document that is not dealt needs a node, too.
    equal_nodes = len(parts) - (parts[-1].ranks < parts[0].ranks)
    for most_dealt in (equal_nodes, 0):
        of_nodes, left = long_parts(ring, shares[0], parts[0].fair, block, len(parts) - 1, most_dealt)
        if of_nodes and of_nodes not in cut:
            cut.append(of_nodes)
            stop = ring.stop.copy()
            stop[list(left)] = list(left.values())
            yield of_nodes + [[] for _ in parts[len(of_nodes) :]], stop
    if not cut and work.max(initial=0) <= parts[0].fair:
        node = assign_whole(size, work, shares, [part.fair for part in parts], [part.most_work for part in parts])
        held: list[Spans] = [[] for _ in parts]
        for i in np.flatnonzero(node >= 0).tolist():
            held[node[i]].append((int(ring.start[i]), int(ring.stop[i])))
        if any(held):
            yield held, np.where(node >= 0, ring.start, ring.stop)


def _fill_up(
    ring: PieceRings, parts: Sequence[Limits], held: Sequence[Spans], resolution: Resolution
) -> list[tuple[Ints, Ints]]:
    """Share a ring among nodes that already hold these spans."""
    ends = [np.array(spans, dtype=np.int64).reshape(-1, 2).T for spans in held]
    left = [
        part.less(int((high - low).sum()), int((ring.profile.work_before(high) - ring.profile.work_before(low)).sum()))
        for part, (low, high) in zip(parts, ends, strict=True)
    ]
    shares = _share_among(ring, [left], resolution)[0]
    return [(np.append(start, low), np.append(stop, high)) for (start, stop), (low, high) in zip(shares, ends, strict=True)]


def _goal(limits: Limits, left: Limits, ranks: int, tokens: int, work: int) -> Goal:
    """Return the goal of the next part of a ring with these tokens and this work, for this many ranks.

    ``left`` are the limits of the parts after it.
    """
    fewest, most = max(limits.fewest, tokens - left.most), min(limits.most, tokens - left.fewest)
    share, shares = limits.fair, limits.fair + left.fair  # nodes and ranks that hold something already get less
    fair_work = work * share // shares if share >= 0 < shares else work * limits.ranks // ranks
    return Goal(
        fewest=fewest,
        tokens=max(min(tokens * limits.ranks // ranks, most), fewest) if tokens else 0,
        most=most,
        least_work=max(min(fair_work, 2 * limits.fair - limits.most_work), work - left.most_work),
        work=fair_work,
        most_work=limits.most_work,
    )


def _share(rings: PieceRings, goals: Sequence[Goal], resolution: Resolution) -> tuple[list[tuple[Ints, Ints]], PieceRings]:
    """Return the starts and stops of the pieces of one part of each ring, and the rings that are left."""
    # Nothing, or all that is left, needs no search.
    chosen = [
        RingInterval(0, 0, 0, goal.tokens) if goal.tokens in (0, tokens) else None
        for goal, tokens in zip(goals, rings.tokens.tolist(), strict=True)
    ]
    if None not in chosen:
        return rings.take(*_places_and_sizes(chosen))
    # The last piece of each ring that fits: it has the most work per token.
    of_pieces = np.array(goals, dtype=np.int64)[rings.ring]
    size, work = rings.stop - rings.start, rings.work_at[1:] - rings.work_at[:-1]
    (fitting,) = ((size <= of_pieces[:, TOKENS]) & (work <= of_pieces[:, MOST_WORK])).nonzero()
    of_fitting = rings.ring[fitting]
    heavy = fitting[np.append(of_fitting[1:] != of_fitting[:-1], True)[: len(fitting)]]
    both = rings.with_copies(heavy)
    beside = [goals[rings.ring[i]].less(int(size[i]), int(work[i])) for i in heavy.tolist()]
    intervals = best_intervals(both, [*goals, *beside], resolution)
    variants, piece_of = list(range(rings.count)), {}
    for i, fixed in enumerate(chosen):
        chosen[i] = fixed or intervals[i]
    for copy, piece in enumerate(heavy.tolist(), rings.count):
        i, interval = int(rings.ring[piece]), intervals[copy]
        current = chosen[i]
        if goals[i].tokens not in (0, rings.tokens[i]) and interval is not None and (current is None or interval < current):
            variants[i], chosen[i], piece_of[i] = copy, interval, piece
    for i, found in enumerate(chosen):
        chosen[i] = found or nearest_interval(rings, i, goals[i], resolution)
    taken, rest = (both.select(np.array(variants)) if piece_of else rings).take(*_places_and_sizes(chosen))
    for i, piece in piece_of.items():
        start, stop = taken[i]
        taken[i] = np.append(start, rings.start[piece]), np.append(stop, rings.stop[piece])
    return taken, rest


def _places_and_sizes(intervals: Sequence[RingInterval | None]) -> tuple[Ints, Ints]:
    found = [(interval.place, interval.tokens) for interval in intervals if interval is not None]
    place, tokens = np.array(found, dtype=np.int64).reshape(-1, 2).T
    return place, tokens


def _within_nodes(
    profile: WorkProfile,
    cuts: Ints,
    of_nodes: Sequence[tuple[Ints, Ints]],
    limits: Sequence[Limits],
    resolution: Resolution,
) -> list[Spans]:
    """Return the spans of each rank of nodes that have these pieces.

    ``cuts`` are the bounds of the documents; without them, no document is dealt among the ranks of a node. ``limits``
    are those of each node.
    """
    dealt = [deal(cuts, *pieces, limit.ranks) for pieces, limit in zip(of_nodes, limits, strict=True)]
    parts = []
    for of_node, limit in zip(dealt, limits, strict=True):
        each = Limits(*(x // limit.ranks for x in limit))
        ends = np.array([span for spans in of_node.held for span in spans], dtype=np.int64).reshape(-1, 2)
        rank = np.repeat(np.arange(limit.ranks), [len(spans) for spans in of_node.held])
        work = profile.work_before(ends[:, 1]) - profile.work_before(ends[:, 0])
        held = zip(*(_sums(rank, x, limit.ranks) for x in (ends[:, 1] - ends[:, 0], work)), strict=True)
        parts.append([each.less(tokens, of_rank) for tokens, of_rank in held])
    node = np.repeat(np.arange(len(dealt)), [len(of_node.start) for of_node in dealt])
    start, stop = (np.concatenate([getattr(of_node, ends) for of_node in dealt]) for ends in ("start", "stop"))
    others = _share_among(PieceRings.of(profile, node, start, stop, len(dealt)), parts, resolution)
    spans = []
    for of_node, rest in zip(dealt, others, strict=True):
        both = zip(of_node.held, rest, strict=True)
        spans += sorted(_joined([*held, *zip(low.tolist(), high.tolist(), strict=True)]) for held, (low, high) in both)
    return spans


def _ordered(mask: Mask, of_ranks: Sequence[Spans], per_node: int) -> list[Spans]:
    """Return the spans of each rank in the order in which kernels compute them."""
    is_causal = bool((mask.table[:, HI] <= 0).all())
    return in_launch_order(of_ranks, _cuts(mask), per_node=per_node, is_causal=is_causal)


def _sums(group: Ints, values: Ints, groups: int) -> list[int]:
    total = np.zeros(groups, dtype=np.int64)
    np.add.at(total, group, values)
    sums: list[int] = total.tolist()
    return sums


def _resolution(share: int, block: int) -> Resolution:
    step = max(1, share // PLACES)
    return Resolution(block=min(block, -(-step // 2)), step=step)


def _documents(mask: Mask, block: int) -> PieceRings:
    """Return the documents of the mask as a ring. Documents that begin in the same block of the sequence are one piece,
    since separating many tiny documents takes time and gains nothing."""
    cuts = _cuts(mask)
    last_in_block = np.append(cuts[1:] // block != cuts[:-1] // block, True)
    last_in_block[0] = True
    cuts = cuts[last_in_block]
    return PieceRings.of(work_profile(mask), np.zeros(len(cuts) - 1, dtype=np.int64), cuts[:-1], cuts[1:], 1)


def _cuts(mask: Mask) -> Ints:
    """Return the bounds of the documents. If queries and keys are of different sequences, there is one."""
    n, keys = mask.lengths
    return mask.documents() if n == keys else np.unique(np.array([0, n], dtype=np.int64))


def _joined(pieces: Spans) -> Spans:
    """Return the pieces in the order of the sequence, adjacent ones joined."""
    spans: Spans = []
    for low, high in sorted(pieces):
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
    return solved if best is solved else best.renumbered(range(best.world), solved.name)


def _count(what: str, value: Any, least: int, of: str = "tokens") -> int:
    try:
        n = operator.index(value)
    except TypeError:
        n = least - 1
    if n < least:
        raise LayoutError(f"balanced: {what} must be an integer number of {of}, at least {least}; got {value!r}")
    return n
