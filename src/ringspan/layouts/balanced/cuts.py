"""Choose an interval of the ring of pieces (``ring.py``; not a ring of ranks) for one rank.

It has the rank's share of tokens and of work, and ends at which few keys are visible from the other side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringspan.layouts.balanced.ring import PieceRing
from ringspan.layouts.layout import Ints


class Goal(NamedTuple):
    """The tokens and the work that a rank should get, each with a minimum and a maximum."""

    fewest: int
    tokens: int
    most: int
    least_work: int
    work: int
    most_work: int

    def less(self, tokens: int, work: int) -> Goal:
        """Return the goal for the rest, if the rank already has this many tokens and this much work."""
        return Goal(*(x - tokens for x in self[:3]), *(x - work for x in self[3:]))


class Resolution(NamedTuple):
    """The resolution of the search: cuts prefer multiples of ``block``, intervals are first tried every ``step``
    tokens."""

    block: int
    step: int


class RingInterval(NamedTuple):
    """``tokens`` tokens from ``place`` on. The smallest tuple is the best: least cost, then nearest to the wanted
    work."""

    cost: int
    off_work: int
    place: int
    tokens: int


def best_interval(ring: PieceRing, goal: Goal, resolution: Resolution) -> RingInterval | None:
    """Return the cheapest interval within the limits of the goal; None if no such interval was found."""
    if not goal.tokens:
        return RingInterval(0, abs(goal.work), 0, 0) if goal.least_work <= 0 <= goal.most_work else None
    place, work = _places(ring, goal, resolution)
    tokens = np.full_like(place, goal.tokens)
    if goal.fewest < goal.most:
        tokens = _sizes_to_an_edge(ring, place, goal)
        work = ring.work_of(place, tokens)
    good = np.flatnonzero((goal.least_work <= work) & (work <= goal.most_work))
    if not len(good):
        return None
    place, tokens, off_work = place[good], tokens[good], np.abs(work[good] - goal.work)
    ends = np.concatenate([place, (place + tokens) % ring.tokens])
    cost = _cost(ring, ends, resolution.block).reshape(2, -1).sum(axis=0)
    best = np.lexsort((place, off_work, cost))[0]
    return RingInterval(int(cost[best]), int(off_work[best]), int(place[best]), int(tokens[best]))


def nearest_interval(ring: PieceRing, goal: Goal, resolution: Resolution) -> RingInterval:
    """Return the interval whose work is nearest to the goal, to within one token. The cost of its cuts is ignored.

    It is found by bisection between an interval with less work and one with more: moving by one token changes the work
    by at most the work of a token.
    """

    def off_work(place: Ints) -> Ints:
        return ring.work_of(place, goal.tokens) - goal.work

    place = ring.grid(resolution.step)
    off = off_work(place)
    less, more = int(place[np.argmin(off)]), int(place[np.argmax(off)])
    more += ring.tokens * (more < less)
    while more - less > 1:
        middle = (less + more) // 2
        if off_work(np.array([middle % ring.tokens]))[0] <= 0:
            less = middle
        else:
            more = middle
    both = np.array([less, more]) % ring.tokens
    off = np.abs(off_work(both))
    return RingInterval(cost=0, off_work=int(off.min()), place=int(both[np.argmin(off)]), tokens=goal.tokens)


def _places(ring: PieceRing, goal: Goal, resolution: Resolution) -> tuple[Ints, Ints]:
    """Return the places to try as starts of intervals, and the work of the intervals with the goal's tokens.

    First, the starts of intervals that begin or end at a piece, or a multiple of the step from there. Then, between two
    of these, the places where linear interpolation puts the work at a limit of the goal, also moved so that either end
    is at a multiple of the block.
    """
    begin = ring.grid(resolution.step)
    place = np.concatenate([begin, (begin - goal.tokens) % ring.tokens])
    place.sort()
    work = ring.work_of(place, goal.tokens)
    next_place, next_work = np.concatenate([place[1:], [ring.tokens]]), np.concatenate([work[1:], work[:1]])
    limits = np.array([goal.least_work, goal.most_work])
    which, i = np.divmod(np.flatnonzero((work < limits[:, None]) != (next_work < limits[:, None])), len(place))
    shift = max(0, ring.work.bit_length() - 31)  # keeps work × tokens below 2⁶³; the result is only a guess
    way, whole_way = np.abs(limits[which] - work[i]) >> shift, np.abs(next_work[i] - work[i]) >> shift
    gap = next_place[i] - place[i]
    guess = place[i] + np.minimum(way * gap // np.maximum(whole_way, 1), gap)
    too_far = ring.within_piece(np.concatenate([guess, guess + goal.tokens]) % ring.tokens) % resolution.block
    at_block = np.concatenate([guess, guess]) - too_far
    guesses = np.concatenate([guess, guess + 1, at_block, at_block + resolution.block]) % ring.tokens
    return np.concatenate([place, guesses]), np.concatenate([work, ring.work_of(guesses, goal.tokens)])


def _sizes_to_an_edge(ring: PieceRing, place: Ints, goal: Goal) -> Ints:
    """Return the sizes of intervals from these places: up to the end of a piece where the goal allows it."""
    tokens = np.full_like(place, goal.tokens)
    end = (place + tokens) % ring.tokens
    above = ring.edge.searchsorted(end)
    for edge in (ring.edge[above], ring.edge[np.maximum(above - 1, 0)]):
        wanted = goal.tokens + edge - end
        tokens = np.where((goal.fewest <= wanted) & (wanted <= goal.most), wanted, tokens)
    return tokens


def _cost(ring: PieceRing, place: Ints, block: int) -> Ints:
    """Return the cost of a cut, in keys: the distances to the furthest keys that are visible across it on both sides,
    and one block for the additional piece, two if it splits a block.

    An end between two pieces is no cut and costs nothing.
    """
    inside = ring.within_piece(place)
    blocks = 1 + (inside % block > 0)
    return np.where(inside > 0, ring.profile.seen_across(ring.token_at(place)[1]) + blocks * block, 0)
