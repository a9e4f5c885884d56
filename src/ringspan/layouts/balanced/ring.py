"""Pieces of the sequence arranged in a ring, and intervals of the ring.

::

    . . . [--piece 0--)[-1-)[------piece 2------)[--3--) . . .      place x counts tokens from the start of piece 0
              |                      |
              x ---- an interval --- x + size                       it may cross the end and continue from the start
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspan.layouts.balanced.work import WorkProfile
from ringspan.layouts.layout import Ints


@dataclass(frozen=True, slots=True)
class PieceRing:
    """Pieces ``[start, stop)`` of the sequence in a ring. No piece is empty."""

    profile: WorkProfile
    start: Ints
    stop: Ints
    edge: Ints  # the place where each piece begins, then the number of all tokens
    work_at: Ints  # the work of all pieces before each edge
    shift: Ints  # for each piece: work before a token in the ring, minus work before that token in the sequence
    tokens: int
    work: int

    @staticmethod
    def of(profile: WorkProfile, start: Ints, stop: Ints) -> PieceRing:
        """Return the ring of pieces, in ascending order of work per token."""
        before_stop, before_start = profile.work_before(np.concatenate([stop, start])).reshape(2, -1)
        work = before_stop - before_start
        order = np.lexsort((start, work // (stop - start)))
        start, stop, work = start[order], stop[order], work[order]
        work_at = _before(work)
        edge, shift = _before(stop - start), work_at[:-1] - before_start[order]
        return PieceRing(profile, start, stop, edge, work_at, shift, int(edge[-1]), int(work_at[-1]))

    def token_at(self, place: Ints) -> tuple[Ints, Ints]:
        """Return the piece at a place before the end, and the token there."""
        piece = self.edge.searchsorted(place, side="right") - 1
        return piece, self.start[piece] + place - self.edge[piece]

    def within_piece(self, place: Ints) -> Ints:
        """Return how many tokens of its piece lie before a place."""
        return place - self.edge[self.edge.searchsorted(place, side="right") - 1]

    def work_of(self, place: Ints, size: Ints | int) -> Ints:
        """Return the work of the intervals of ``size`` tokens from these places."""
        end = place + size
        over = end >= self.tokens
        at_end, at_place = self._work_before(np.concatenate([end - over * self.tokens, place])).reshape(2, -1)
        return at_end - at_place + over * self.work

    def _work_before(self, place: Ints) -> Ints:
        piece, token = self.token_at(place)
        return self.shift[piece] + self.profile.work_before(token)

    def grid(self, step: int) -> Ints:
        """Return the places where pieces begin, and every ``step`` tokens after each."""
        count = -((self.edge[:-1] - self.edge[1:]) // step)
        before = _before(count)
        return np.repeat(self.edge[:-1] - before[:-1] * step, count) + np.arange(before[-1]) * step

    def take(self, place: int, size: int) -> tuple[Ints, Ints, PieceRing]:
        """Return the starts and stops of the pieces in an interval, and the ring without it."""
        ends = [place, place + size] if place + size <= self.tokens else [place, self.tokens, place + size - self.tokens]
        edge = np.concatenate([self.edge, ends])
        edge.sort()
        edge = edge[np.flatnonzero(np.diff(edge, prepend=-1))]
        _, start = self.token_at(edge[:-1])
        stop = start + np.diff(edge)
        inside = (edge[:-1] - place) % self.tokens < size
        return start[inside], stop[inside], PieceRing.of(self.profile, start[~inside], stop[~inside])

    def without(self, piece: int) -> PieceRing:
        """Return the ring without a piece."""
        kept = np.delete(np.arange(len(self.start)), piece)
        edge, work_at = _before(np.diff(self.edge)[kept]), _before(np.diff(self.work_at)[kept])
        shift = self.shift[kept] + work_at[:-1] - self.work_at[kept]
        return PieceRing(self.profile, self.start[kept], self.stop[kept], edge, work_at, shift, int(edge[-1]), int(work_at[-1]))


def _before(values: Ints) -> Ints:
    """Return the sum of the values before each value, and then of all."""
    total = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=total[1:])
    return total
