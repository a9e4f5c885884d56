"""Choose an interval of a ring of pieces (``ring.py``; not a ring of ranks) for one rank, in several rings at once.

It has the rank's share of tokens and of work, and ends at which few keys are visible from the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from ringspan.layouts.balanced.ring import Grid, PieceRings
from ringspan.layouts.layout import Ints

BISECTIONS = 4  # whose places are computed at once


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
    columns = np.array(list(zip(*goals, strict=True)), dtype=np.int64)
    fewest, wanted, most, least_work, mean_work, most_work = columns
    place, ring, work = _places(rings, wanted, columns[3::2], resolution)
    tokens = wanted[ring]
    if (fewest < most).any():
        tokens = _sizes_to_an_edge(rings, place, ring, goals)
        work = rings.work_of(place, ring, tokens)
    (good,) = ((least_work[ring] <= work) & (work <= most_work[ring])).nonzero()
    if not len(good):
        return found
    place, ring, tokens = place[good], ring[good], tokens[good]
    off_work = np.abs(work[good] - mean_work[ring])
    ends = np.concatenate([place, rings.wrapped(place + tokens, ring)])
    cost = _cost(rings, ends, resolution.block).reshape(2, -1).sum(axis=0)
    order = np.lexsort((place, off_work, cost, ring))
    of_rings = ring[order]
    (at,) = np.concatenate(([True], of_rings[1:] != of_rings[:-1])).nonzero()
    of_rings, best = of_rings[at], order[at]
    intervals = (of_rings, cost[best], off_work[best], place[best] - rings.base[of_rings], tokens[best])
    for n, *interval in zip(*(column.tolist() for column in intervals), strict=True):
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

    place = alone.grid(resolution.step).place
    off = off_work(place)
    less, more = int(place[np.argmin(off)]), int(place[np.argmax(off)])
    more += tokens * (more < less)
    while more - less > 1:
        # All places that the next bisections may ask for, since arrays of a few places take as long as one.
        middles = _middles(less, more)
        is_less = dict(zip(middles, (off_work(np.array(middles) % tokens) <= 0).tolist(), strict=True))
        for _ in range(BISECTIONS):
            middle = (less + more) // 2
            less, more = (middle, more) if is_less[middle] else (less, middle)
            if more - less <= 1:
                break
    both = np.array([less, more]) % tokens
    off = np.abs(off_work(both))
    return RingInterval(cost=0, off_work=int(off.min()), place=int(both[np.argmin(off)]), tokens=goal.tokens)


def _middles(less: int, more: int) -> list[int]:
    """Return the places in the middle between two places, in the middle of both halves, and so on."""
    ends, middles = [less, more], []
    for _ in range(BISECTIONS):
        between = [(a + b) // 2 for a, b in pairwise(ends)]
        middles += between
        ends = [*chain.from_iterable(zip(ends, between, strict=False)), more]
    return middles


def _places(rings: PieceRings, wanted: Ints, limits: Ints, resolution: Resolution) -> tuple[Ints, Ints, Ints]:
    """Return the places to try as starts of intervals, their rings, and the work of the intervals with the wanted
    tokens of their ring. ``limits`` are the least and the most work of each ring.

    First, the starts of intervals that begin or end at a piece, or a multiple of the step from there. Then, between two
    of these, the places where linear interpolation puts the work at a limit, also moved so that either end is at a
    multiple of the block.
    """
    place, ring, work, first = _grid_intervals(rings, wanted, resolution.step)
    of_places = limits[:, ring]
    below = work < of_places
    differs = np.empty_like(below)
    np.not_equal(below[:, 1:], below[:, :-1], out=differs[:, :-1])
    # The last interval of each ring is followed by the first.
    (filled,) = (first[1:] > first[:-1]).nonzero()
    begins, lasts = first[filled], first[filled + 1] - 1
    differs[:, lasts] = below[:, begins] != below[:, lasts]
    which, i = np.divmod(np.flatnonzero(differs), len(place))
    in_ring = ring[i]
    following = i + 1
    is_last = following == first[in_ring + 1]
    next_work = work[np.where(is_last, first[in_ring], following)]
    shift = max(0, int(rings.work.max()).bit_length() - 31)  # keeps work × tokens below 2⁶³; the result is only a guess
    way, whole_way = np.abs(limits[which, in_ring] - work[i]) >> shift, np.abs(next_work - work[i]) >> shift
    gap = np.where(is_last, rings.base[in_ring + 1], place[following - is_last]) - place[i]
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


def _grid_intervals(rings: PieceRings, wanted: Ints, step: int) -> Grid:
    """Return the intervals with the wanted tokens of their ring that begin or end at a place of the grid, in order,
    with their work instead of the work before their place."""
    grid = rings.grid(step)
    tokens, end_of_ring, all_work = (x[grid.ring] for x in (wanted, rings.base[1:], rings.work))
    start, stop = rings.wrapped(grid.place - tokens, grid.ring), grid.place + tokens
    starts_over, stops_over = start + tokens >= end_of_ring, stop >= end_of_ring
    stop -= stops_over * rings.tokens[grid.ring]
    at_stop, at_start = rings.work_until(np.concatenate([stop, start])).reshape(2, -1)
    work = np.concatenate([at_stop - grid.work + stops_over * all_work, grid.work - at_start + starts_over * all_work])
    place = np.concatenate([grid.place, start])
    # Sorting numbers takes half as long as sorting their indices. Equal places have equal work.
    bits = len(place).bit_length()
    key = (place << bits) + np.arange(len(place))
    key.sort()
    return Grid(key >> bits, grid.ring.repeat(2), work[key & ((1 << bits) - 1)], 2 * grid.first)


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
    after = token - rings.start[piece]
    (inside,) = after.nonzero()
    cost = np.zeros_like(place)
    cost[inside] = rings.profile.seen_across(token[inside]) + (1 + (after[inside] % block > 0)) * block
    return cost
