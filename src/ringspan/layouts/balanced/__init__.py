"""Equal tokens, equal work, few pieces and few keys to fetch, for any mask.

The documents lie on a closed string, a *necklace*. Slide an arc of one rank's tokens around it: over all places it holds one
rank's work on average, so somewhere it holds just that. Cut it out, close the string, and go on with the rest. Every rank gets
its share of tokens and of work; each arc makes at most two cuts, so there are at most two pieces a rank more than documents.

::

    causal(8) on 2 ranks                    0 1 2 3 4 5 6 7 (0 1 2 …          token t is t + 1 pairs of work, 18 for each rank
    an arc of 4 tokens with 18 pairs            [-------)                     3 + 4 + 5 + 6
    what is left, closed                    0 1         6 7 (0 1 …            1 + 2 + 7 + 8: zigzag

The string begins with the lightest document and closes behind the heaviest. An arc over its end so takes the heavy end of a
document that is too much for one rank, and light documents beside it.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ringspan.errors import LayoutError
from ringspan.layouts.balanced.cuts import Goal, Grain, best_arc, nearest_arc
from ringspan.layouts.balanced.renumber import side_by_side
from ringspan.layouts.balanced.ring import Necklace
from ringspan.layouts.balanced.work import Profile
from ringspan.layouts.contiguous import contiguous
from ringspan.layouts.cut import areas
from ringspan.layouts.layout import Ints, Layout, check_world
from ringspan.layouts.zigzag import zigzag
from ringspan.masks import Mask

# The work of a rank may exceed the mean by one part in so many: room to choose cuts that cost little.
TOLERANCE = 80

# Arcs are first tried at so many places for each rank's share.
PLACES = 8


def balanced(mask: Mask, world: int, *, block: int = 128, slack: int = 0) -> Layout:
    """Each rank gets the arc across whose ends the fewest keys are seen, or the heaviest document that fits and such an arc.

    Token counts differ by at most one, or, with ``slack``, are up to so many above or below where that saves a cut. Documents
    are cut at multiples of ``block`` where the work allows it. Ranks that share documents get numbers side by side, so that
    mostly they share a node, too. Without slack the balance is nowhere worse than with contiguous,
    nor than with zigzag where that shares the tokens as evenly.

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
    grain = Grain(block=min(block, -(-step // 2)), step=step)
    necklace = _documents(mask, grain.block)
    held = []
    for others in reversed(range(world)):
        work = necklace.work // (others + 1)
        goal = Goal(
            fewest=max(fewest, necklace.tokens - others * most),
            tokens=necklace.tokens // (others + 1),
            most=min(most, necklace.tokens - others * fewest),
            least_work=max(min(work, 2 * fair - most_work), necklace.work - others * most_work),
            work=work,
            most_work=most_work,
        )
        start, stop, necklace = _share(necklace, goal, grain)
        held.append(_spans(start, stop))
    solved = Layout(sorted(held), name="balanced")
    best = solved if slack else _best(mask, solved)
    has_documents = mask.lengths[0] == mask.lengths[1] and len(mask.documents()) > 2
    return side_by_side(mask, best) if has_documents else best


def _documents(mask: Mask, block: int) -> Necklace:
    """The documents of the mask. Of those that begin within the same block of the sequence only the last counts as a beginning:
    crowds of tiny ones are no better apart, and would take time."""
    n, keys = mask.lengths
    cuts = mask.documents() if n == keys else np.unique(np.array([0, n], dtype=np.int64))
    last_in_block = np.append(cuts[1:] // block != cuts[:-1] // block, True)
    last_in_block[0] = True
    cuts = cuts[last_in_block]
    return Necklace.of(Profile(mask), cuts[:-1], cuts[1:])


def _share(necklace: Necklace, goal: Goal, grain: Grain) -> tuple[Ints, Ints, Necklace]:
    """The starts and stops of the pieces for one rank, and what is left."""
    if goal.tokens in (0, necklace.tokens):
        return necklace.take(0, goal.tokens)
    arc = best_arc(necklace, goal, grain)
    size, work = np.diff(necklace.edge), np.diff(necklace.work_at)
    for piece in np.flatnonzero((size <= goal.tokens) & (work <= goal.most_work))[-1:].tolist():
        others = necklace.without(piece)
        beside = best_arc(others, goal.less(int(size[piece]), int(work[piece])), grain)
        if beside is not None and (arc is None or beside < arc):
            start, stop, rest = others.take(beside.place, beside.tokens)
            return np.append(start, necklace.start[piece]), np.append(stop, necklace.stop[piece]), rest
    arc = arc or nearest_arc(necklace, goal, grain)
    return necklace.take(arc.place, arc.tokens)


def _spans(start: Ints, stop: Ints) -> list[tuple[int, int]]:
    """The pieces in the order of the sequence, neighbours joined."""
    spans: list[tuple[int, int]] = []
    for low, high in sorted(zip(start.tolist(), stop.tolist(), strict=True)):
        joins = bool(spans) and spans[-1][1] == low
        spans.append((spans.pop()[0] if joins else low, high))
    return spans


def _best(mask: Mask, solved: Layout) -> Layout:
    """Where a simple layout is better balanced and shares the tokens as evenly, it is the one to take: the mask is made for it,
    or a rank has so few tokens that each of them matters."""
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
        raise LayoutError(f"balanced: {what} must be a whole number of tokens, at least {least}; got {value!r}")
    return n
