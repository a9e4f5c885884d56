"""Pieces of the sequence arranged in rings, and intervals of the rings.

::

    . . . [--piece 0--)[-1-)[------piece 2------)[--3--) . . .      place x counts tokens from the start of piece 0
              |                      |
              x ---- an interval --- x + size                       it may cross the end and continue from the start

The rings of several nodes are searched together, since arrays of a few pieces take as long as arrays of a few hundred.
Places count through all rings, so a place also tells its ring::

    ring 0                    ring 1              ring 2
    [--piece 0--)[--piece 1--)[-----piece 2-----)[-3-)[--piece 4--)
    base[0]                   base[1]            base[2]           base[3]
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ringspan.layouts.layout import Ints
from ringspan.layouts.work import WorkProfile
from ringspan.masks.table import ranges


@dataclass(frozen=True, slots=True)
class PieceRings:
    """Pieces ``[start, stop)`` of the sequence in rings, ring after ring. No piece is empty, but a ring may have
    none."""

    profile: WorkProfile
    ring: Ints  # the ring of each piece
    start: Ints
    stop: Ints
    before: Ints  # the work before each piece in the sequence
    first: Ints  # the first piece of each ring, then the number of all pieces
    edge: Ints  # the place where each piece begins, then the number of all tokens
    base: Ints  # the place where each ring begins, then the number of all tokens
    work_at: Ints  # the work of all pieces before each edge
    tokens: Ints  # of each ring
    work: Ints  # of each ring

    @staticmethod
    def of(profile: WorkProfile, ring: Ints, start: Ints, stop: Ints, count: int) -> PieceRings:
        """Return ``count`` rings of these pieces, each in ascending order of work per token."""
        before_stop, before = profile.work_before(np.concatenate([stop, start])).reshape(2, -1)
        return PieceRings._sorted(profile, ring, start, stop, before, before_stop - before, count)

    @staticmethod
    def _sorted(profile: WorkProfile, ring: Ints, start: Ints, stop: Ints, before: Ints, work: Ints, count: int) -> PieceRings:
        order = np.lexsort((start, work // (stop - start), ring))
        columns = ring[order], start[order], stop[order], before[order], work[order]
        return PieceRings._arranged(profile, *columns, count)

    @staticmethod
    def _arranged(
        profile: WorkProfile, ring: Ints, start: Ints, stop: Ints, before: Ints, work: Ints, count: int
    ) -> PieceRings:
        first = ring.searchsorted(np.arange(count + 1))
        edge, work_at = _before(stop - start), _before(work)
        base, work_before_ring = edge[first], work_at[first]
        tokens, work_of_rings = base[1:] - base[:-1], work_before_ring[1:] - work_before_ring[:-1]
        return PieceRings(profile, ring, start, stop, before, first, edge, base, work_at, tokens, work_of_rings)

    @property
    def count(self) -> int:
        return len(self.tokens)

    def select(self, rings: Ints) -> PieceRings:
        """Return these rings only, in this order. A ring may occur more than once."""
        size = self.first[rings + 1] - self.first[rings]
        return self._of_pieces(np.arange(len(rings)).repeat(size), ranges(self.first[rings], size), len(rings))

    def with_copies(self, pieces: Ints) -> PieceRings:
        """Return all rings, and then for each of these pieces a copy of its ring without that piece."""
        rings = self.ring[pieces]
        size = self.first[rings + 1] - self.first[rings]
        copied, copy = ranges(self.first[rings], size), np.arange(len(pieces)).repeat(size)
        (kept,) = (copied != pieces[copy]).nonzero()
        return self._of_pieces(
            np.concatenate([self.ring, self.count + copy[kept]]),
            np.concatenate([np.arange(len(self.ring)), copied[kept]]),
            self.count + len(pieces),
        )

    def _of_pieces(self, ring: Ints, piece: Ints, count: int) -> PieceRings:
        work = self.work_at[piece + 1] - self.work_at[piece]
        return PieceRings._arranged(self.profile, ring, self.start[piece], self.stop[piece], self.before[piece], work, count)

    def token_at(self, place: Ints) -> tuple[Ints, Ints]:
        """Return the piece at a place before the end, and the token there."""
        piece = self.edge.searchsorted(place, side="right") - 1
        return piece, self.start[piece] + place - self.edge[piece]

    def work_until(self, place: Ints) -> Ints:
        """Return the work of all pieces before a place before the end."""
        piece, token = self.token_at(place)
        return self.work_at[piece] - self.before[piece] + self.profile.work_before(token)

    def wrapped(self, place: Ints, ring: Ints) -> Ints:
        """Return places within these rings, for places that may be before or after them."""
        base = self.base[ring]
        return base + (place - base) % self.tokens[ring]

    def work_of(self, place: Ints, ring: Ints, size: Ints) -> Ints:
        """Return the work of the intervals of ``size`` tokens from these places in these rings."""
        end = place + size
        over = end >= self.base[ring + 1]
        at_end, at_place = self.work_until(np.concatenate([end - over * self.tokens[ring], place])).reshape(2, -1)
        return at_end - at_place + over * self.work[ring]

    def grid(self, step: int) -> Grid:
        """Return the places where pieces begin, and every ``step`` tokens after each."""
        count = -((self.edge[:-1] - self.edge[1:]) // step)
        before = _before(count)
        piece = np.arange(len(count)).repeat(count)
        after = (np.arange(len(piece)) - before[piece]) * step  # tokens after the start of the piece
        work = self.work_at[piece]
        (inside,) = after.nonzero()
        of = piece[inside]
        work[inside] += self.profile.work_before(self.start[of] + after[inside]) - self.before[of]
        return Grid(self.edge[piece] + after, self.ring[piece], work, before[self.first])

    def take(self, place: Ints, size: Ints) -> tuple[list[tuple[Ints, Ints]], PieceRings]:
        """Return the starts and stops of the pieces in an interval of each ring, and the rings without them.

        ``place`` counts from the start of each ring.
        """
        end = place + size
        end -= (end > self.tokens) * self.tokens
        edge = np.concatenate([self.edge, self.base[:-1] + place, self.base[:-1] + end])
        edge.sort()
        edge = edge[np.append(edge[1:] != edge[:-1], True)]
        begin = edge[:-1]
        piece, start = self.token_at(begin)
        stop, ring = start + (edge[1:] - begin), self.ring[piece]
        is_inside = (begin - self.base[ring] - place[ring]) % self.tokens[ring] < size[ring]
        (inside,), (left,) = is_inside.nonzero(), (~is_inside).nonzero()
        bounds = ring[inside].searchsorted(np.arange(self.count + 1)).tolist()
        low, high = start[inside], stop[inside]
        taken = [(low[a:b], high[a:b]) for a, b in pairwise(bounds)]
        return taken, self._parts(piece[left], start[left], stop[left])

    def _parts(self, piece: Ints, start: Ints, stop: Ints) -> PieceRings:
        """Return the rings with these parts of the pieces only."""
        ring, before, work = self.ring[piece], self.before[piece], self.work_at[piece + 1] - self.work_at[piece]
        (cut,) = (stop - start < self.stop[piece] - self.start[piece]).nonzero()
        if not len(cut):  # whole pieces are in order
            return PieceRings._arranged(self.profile, ring, start, stop, before, work, self.count)
        before_stop, before[cut] = self.profile.work_before(np.concatenate([stop[cut], start[cut]])).reshape(2, -1)
        work[cut] = before_stop - before[cut]
        return PieceRings._sorted(self.profile, ring, start, stop, before, work, self.count)


class Grid(NamedTuple):
    """Places in rings, in order, and the ring and the work of all pieces before each. ``first`` is the index of the
    first place of each ring, then the number of all."""

    place: Ints
    ring: Ints
    work: Ints
    first: Ints


def _before(values: Ints) -> Ints:
    """Return the sum of the values before each value, and then of all."""
    total = np.zeros(len(values) + 1, dtype=np.int64)
    values.cumsum(out=total[1:])
    return total
