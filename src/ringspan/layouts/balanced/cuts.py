"""Choose an interval of a ring of pieces (``ring.py``; not a ring of ranks) for one rank, in several rings at once.

It has the rank's share of tokens and of work, and ends at which few keys are visible from the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringspan.layouts.balanced.ring import PieceRings
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


def best_intervals(rings: PieceRings, goals: Sequence[Goal], resolution: Resolution) -> list[RingInterval | None]:
    """Return the cheapest interval of each ring within the limits of its goal; None if no such interval was found."""
    found: list[RingInterval | None] = [_empty_interval(goal) for goal in goals]
    if not len(rings.start):
        return found
    fewest, wanted, most, least_work, mean_work, most_work = np.array(goals, dtype=np.int64).reshape(-1, 6).T
    place, ring, work = _places(rings, wanted, np.stack([least_work, most_work]), resolution)
    tokens = wanted[ring]
    if (fewest < most).any():
        tokens = _sizes_to_an_edge(rings, place, ring, goals)
        work = rings.work_of(place, ring, tokens)
    good = np.flatnonzero((least_work[ring] <= work) & (work <= most_work[ring]))
    if not len(good):
        return found
    place, ring, tokens = place[good], ring[good], tokens[good]
    off_work = np.abs(work[good] - mean_work[ring])
    ends = np.concatenate([place, rings.wrapped(place + tokens, ring)])
    cost = _cost(rings, ends, resolution.block).reshape(2, -1).sum(axis=0)
    order = np.lexsort((place, off_work, cost, ring))
    of_rings, at = np.unique(ring[order], return_index=True)
    best = order[at]
    columns = (of_rings, cost[best], off_work[best], place[best] - rings.base[of_rings], tokens[best])
    for n, *interval in np.stack(columns, axis=1).tolist():
        if goals[n].tokens:
            found[n] = RingInterval(*interval)
    return found


def _empty_interval(goal: Goal) -> RingInterval | None:
    """Return the interval without tokens, if the goal asks for it and its limits allow it."""
    is_good = not goal.tokens and goal.least_work <= 0 <= goal.most_work
    return RingInterval(0, abs(goal.work), 0, 0) if is_good else None


def nearest_interval(rings: PieceRings, ring: int, goal: Goal, resolution: Resolution) -> RingInterval:
    """Return the interval of a ring whose work is nearest to the goal, to within one token. The cost of its cuts is
    ignored.

    It is found by bisection between an interval with less work and one with more: moving by one token changes the work
    by at most the work of a token.
    """
    alone = rings.select(np.array([ring]))
    tokens = int(alone.tokens[0])

    def off_work(place: Ints) -> Ints:
        return alone.work_of(place, np.zeros_like(place), np.full_like(place, goal.tokens)) - goal.work

    place, _ = alone.grid(resolution.step)
    off = off_work(place)
    less, more = int(place[np.argmin(off)]), int(place[np.argmax(off)])
    more += tokens * (more < less)
    while more - less > 1:
        middle = (less + more) // 2
        if off_work(np.array([middle % tokens]))[0] <= 0:
            less = middle
        else:
            more = middle
    both = np.array([less, more]) % tokens
    off = np.abs(off_work(both))
    return RingInterval(cost=0, off_work=int(off.min()), place=int(both[np.argmin(off)]), tokens=goal.tokens)


def _places(rings: PieceRings, wanted: Ints, limits: Ints, resolution: Resolution) -> tuple[Ints, Ints, Ints]:
    """Return the places to try as starts of intervals, their rings, and the work of the intervals with the wanted
    tokens of their ring. ``limits`` are the least and the most work of each ring.

    First, the starts of intervals that begin or end at a piece, or a multiple of the step from there. Then, between two
    of these, the places where linear interpolation puts the work at a limit, also moved so that either end is at a
    multiple of the block.
    """
    begin, ring = rings.grid(resolution.step)
    place = np.concatenate([begin, rings.wrapped(begin - wanted[ring], ring)])
    place.sort()
    ring = np.repeat(ring, 2)  # in order, as the places: each ring has twice as many
    work = rings.work_of(place, ring, wanted[ring])
    last = np.flatnonzero(np.diff(ring, append=-1))  # of each ring
    next_place, next_work = np.append(place[1:], rings.base[-1]), np.append(work[1:], 0)
    next_work[last] = work[np.append(0, last[:-1] + 1)]
    of_places = limits[:, ring]
    which, i = np.divmod(np.flatnonzero((work < of_places) != (next_work < of_places)), len(place))
    in_ring = ring[i]
    shift = max(0, int(rings.work.max()).bit_length() - 31)  # keeps work × tokens below 2⁶³; the result is only a guess
    way, whole_way = np.abs(of_places[which, i] - work[i]) >> shift, np.abs(next_work[i] - work[i]) >> shift
    gap = next_place[i] - place[i]
    guess = place[i] + np.minimum(way * gap // np.maximum(whole_way, 1), gap)
    twice = np.concatenate([in_ring, in_ring])
    at = rings.wrapped(np.concatenate([guess, guess + wanted[in_ring]]), twice)
    too_far = (at - rings.edge[rings.edge.searchsorted(at, side="right") - 1]) % resolution.block
    at_block = np.concatenate([guess, guess]) - too_far
    of_guesses = np.concatenate([twice, twice, twice])
    guesses = rings.wrapped(np.concatenate([guess, guess + 1, at_block, at_block + resolution.block]), of_guesses)
    work_of_guesses = rings.work_of(guesses, of_guesses, wanted[of_guesses])
    both = ((place, guesses), (ring, of_guesses), (work, work_of_guesses))
    place, ring, work = (np.concatenate(columns) for columns in both)
    return place, ring, work


def _sizes_to_an_edge(rings: PieceRings, place: Ints, ring: Ints, goals: Sequence[Goal]) -> Ints:
    """Return the sizes of intervals from these places: up to the end of a piece where the goal allows it."""
    fewest, wanted, most = (x[ring] for x in np.array(goals, dtype=np.int64).reshape(-1, 6).T[:3])
    tokens, end = wanted, rings.wrapped(place + wanted, ring)
    above = rings.edge.searchsorted(end)
    for edge in (rings.edge[above], rings.edge[np.maximum(above - 1, rings.first[ring])]):
        size = wanted + edge - end
        tokens = np.where((fewest <= size) & (size <= most), size, tokens)
    return tokens


def _cost(rings: PieceRings, place: Ints, block: int) -> Ints:
    """Return the cost of a cut, in keys: the distances to the furthest keys that are visible across it on both sides,
    and one block for the additional piece, two if it splits a block.

    An end between two pieces is no cut and costs nothing.
    """
    piece, token = rings.token_at(place)
    inside = token - rings.start[piece]
    blocks = 1 + (inside % block > 0)
    return np.where(inside > 0, rings.profile.seen_across(token) + blocks * block, 0)
