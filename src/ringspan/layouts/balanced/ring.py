"""Pieces of the sequence on a closed string, and the arcs that can be cut out of it.

::

    . . . [--piece 0--)[-1-)[------piece 2------)[--3--) . . .      place x counts tokens from the start of piece 0
              |                      |
              x ------ an arc ------ x + size                       it may run over the end and on from the start
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspan.layouts.balanced.work import Profile
from ringspan.layouts.layout import Ints


@dataclass(frozen=True, slots=True)
class Necklace:
    """Pieces ``[start, stop)`` in a ring, none of them empty."""

    profile: Profile
    start: Ints
    stop: Ints
    edge: Ints  # the place where each piece begins, and the number of all tokens
    work_at: Ints  # the work of all pieces before each edge
    shift: Ints  # for each piece: work before a token of it on the necklace, less work before that token in the sequence

    @staticmethod
    def of(profile: Profile, start: Ints, stop: Ints) -> Necklace:
        """The pieces strung from the lightest to the heaviest, by work a token: where the ring closes, heavy meets light."""
        work = profile.work_before(stop) - profile.work_before(start)
        order = np.lexsort((start, work // (stop - start)))
        start, stop, work = start[order], stop[order], work[order]
        work_at = _before(work)
        return Necklace(profile, start, stop, _before(stop - start), work_at, work_at[:-1] - profile.work_before(start))

    @property
    def tokens(self) -> int:
        return int(self.edge[-1])

    @property
    def work(self) -> int:
        return int(self.work_at[-1])

    def token_at(self, place: Ints) -> tuple[Ints, Ints]:
        """The piece at a place before the end, and the token there."""
        piece = self.edge.searchsorted(place, side="right") - 1
        return piece, self.start[piece] + place - self.edge[piece]

    def within_piece(self, place: Ints) -> Ints:
        """How far into its piece a place before the end is."""
        return place - self.edge[self.edge.searchsorted(place, side="right") - 1]

    def work_of(self, place: Ints, size: Ints) -> Ints:
        """The work of the arcs of so many tokens from these places."""
        end = place + size
        over = end >= self.tokens
        at_end, at_place = self._work_before(np.concatenate([end - over * self.tokens, place])).reshape(2, -1)
        return at_end - at_place + over * self.work

    def _work_before(self, place: Ints) -> Ints:
        piece, token = self.token_at(place)
        return self.shift[piece] + self.profile.work_before(token)

    def grid(self, step: int) -> Ints:
        """The places where pieces begin, and every so many tokens after each."""
        count = -(-np.diff(self.edge) // step)
        nth = np.arange(count.sum()) - np.repeat(_before(count)[:-1], count)
        return np.repeat(self.edge[:-1], count) + nth * step

    def take(self, place: int, size: int) -> tuple[Ints, Ints, Necklace]:
        """The starts and stops of what lies on the arc, and the necklace closed again without it."""
        ends = [place, place + size] if place + size <= self.tokens else [place, self.tokens, place + size - self.tokens]
        edge = np.unique(np.append(self.edge, ends))
        _, start = self.token_at(edge[:-1])
        stop = start + np.diff(edge)
        on_arc = (edge[:-1] - place) % self.tokens < size
        return start[on_arc], stop[on_arc], Necklace.of(self.profile, start[~on_arc], stop[~on_arc])

    def without(self, piece: int) -> Necklace:
        """The necklace closed again without a piece."""
        return Necklace.of(self.profile, np.delete(self.start, piece), np.delete(self.stop, piece))


def _before(values: Ints) -> Ints:
    """The sum of the values before each, and of all."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
