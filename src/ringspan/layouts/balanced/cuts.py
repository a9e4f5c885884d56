"""Which arc of a necklace suits a rank: the right number of tokens, the right amount of work, and ends that cost little."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringspan.layouts.balanced.ring import Necklace
from ringspan.layouts.layout import Ints


class Goal(NamedTuple):
    """What a rank should get: how many tokens and how much work, each with the least and the most."""

    fewest: int
    tokens: int
    most: int
    least_work: int
    work: int
    most_work: int

    def less(self, tokens: int, work: int) -> Goal:
        """What is missing when it has so much."""
        return Goal(*(x - tokens for x in self[:3]), *(x - work for x in self[3:]))


class Grain(NamedTuple):
    """How finely to look: pieces are best cut at multiples of ``block``, arcs are first tried every ``step`` tokens."""

    block: int
    step: int


class Arc(NamedTuple):
    """So many tokens from a place on. The smallest is the best: the cheapest, then the nearest to the work it should have."""

    cost: int
    off_work: int
    place: int
    tokens: int


def best_arc(necklace: Necklace, goal: Goal, grain: Grain) -> Arc | None:
    """The cheapest arc within the limits of the goal; None if none was found."""
    if not goal.tokens:
        return Arc(0, abs(goal.work), 0, 0) if goal.least_work <= 0 <= goal.most_work else None
    place = _places(necklace, goal, grain)
    tokens = _to_an_edge(necklace, place, goal)
    work = necklace.work_of(place, tokens)
    good = np.flatnonzero((goal.least_work <= work) & (work <= goal.most_work))
    if not len(good):
        return None
    place, tokens, off_work = place[good], tokens[good], np.abs(work[good] - goal.work)
    ends = np.concatenate([place, (place + tokens) % necklace.tokens])
    cost = _cost(necklace, ends, grain.block).reshape(2, -1).sum(axis=0)
    best = np.lexsort((place, off_work, cost))[0]
    return Arc(int(cost[best]), int(off_work[best]), int(place[best]), int(tokens[best]))


def nearest_arc(necklace: Necklace, goal: Goal, grain: Grain) -> Arc:
    """An arc whose work is that of the goal, as nearly as single tokens allow, whatever it costs.

    There is one between every arc that has less and every one that has more: the work changes by a token's at a time.
    """

    def off_work(place: Ints) -> Ints:
        return necklace.work_of(place, np.full_like(place, goal.tokens)) - goal.work

    place = necklace.grid(grain.step)
    off = off_work(place)
    less, more = int(place[np.argmin(off)]), int(place[np.argmax(off)])
    more += necklace.tokens * (more < less)
    while more - less > 1:
        middle = (less + more) // 2
        if off_work(np.array([middle % necklace.tokens]))[0] <= 0:
            less = middle
        else:
            more = middle
    both = np.array([less, more]) % necklace.tokens
    off = np.abs(off_work(both))
    return Arc(cost=0, off_work=int(off.min()), place=int(both[np.argmin(off)]), tokens=goal.tokens)


def _places(necklace: Necklace, goal: Goal, grain: Grain) -> Ints:
    """Where arcs may begin: so that they begin or end with a piece, or every step from there; and where the work comes within
    its limits if it changes evenly in between, then also with either end moved to a multiple of the block."""
    begin = necklace.grid(grain.step)
    place = np.sort(np.concatenate([begin, (begin - goal.tokens) % necklace.tokens]))
    work = necklace.work_of(place, np.full_like(place, goal.tokens))
    gap, next_work = np.diff(place, append=necklace.tokens), np.roll(work, -1)
    shift = max(0, necklace.work.bit_length() - 31)  # keeps work × tokens below 2⁶³; what comes out is only a guess
    found = [place]
    for limit in (goal.least_work, goal.most_work):
        i = np.flatnonzero((work < limit) != (next_work < limit))
        way, whole_way = np.abs(limit - work[i]) >> shift, np.abs(next_work[i] - work[i]) >> shift
        guess = place[i] + np.minimum(way * gap[i] // np.maximum(whole_way, 1), gap[i])
        found += [guess, guess + 1]
        for end in (guess, guess + goal.tokens):
            too_far = necklace.within_piece(end % necklace.tokens) % grain.block
            found += [guess - too_far, guess - too_far + grain.block]
    return np.concatenate(found) % necklace.tokens


def _to_an_edge(necklace: Necklace, place: Ints, goal: Goal) -> Ints:
    """How many tokens the arcs from these places have: as many as bring them to the end of a piece, where the goal allows."""
    tokens = np.full_like(place, goal.tokens)
    end = (place + tokens) % necklace.tokens
    above = necklace.edge.searchsorted(end)
    for edge in (necklace.edge[above], necklace.edge[np.maximum(above - 1, 0)]):
        wanted = goal.tokens + edge - end
        tokens = np.where((goal.fewest <= wanted) & (wanted <= goal.most), wanted, tokens)
    return tokens


def _cost(necklace: Necklace, place: Ints, block: int) -> Ints:
    """What a cut costs, in keys: those seen across it, and a block of the kernel for one more piece, two if it leaves part of
    a block. Between pieces there is nothing to cut."""
    inside = necklace.within_piece(place)
    blocks = 1 + (inside % block > 0)
    return np.where(inside > 0, necklace.profile.seen_across(necklace.token_at(place)[1]) + blocks * block, 0)
