"""The side that is sent to other ranks, keys or queries. The planner of staged strategies works with either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringspan.layouts import Layout, Tiles
from ringspan.masks import Band
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1, Table
from ringspan.plans.data import PayloadKind, Phase, Task
from ringspan.plans.problem import Ints, Problem, union
from ringspan.plans.slot_tokens import SlotTokens


class RowRanges(NamedTuple):
    """Rows ``start`` to ``stop`` of rank ``owner`` that rank ``receiver`` needs. Sorted by owner, receiver and
    start."""

    owner: Ints
    receiver: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingSide:
    """Keys or queries: the payload of their transfers, and the columns of a band that refer to them.

    ``returned`` is the payload that is returned to the owners in each phase, or None.
    """

    what: PayloadKind
    returned: dict[Phase, PayloadKind | None]
    rows: tuple[int, int]  # the columns of a band with its first row and its end
    slant: int  # how much k - q grows when these rows shift by one

    def layout(self, problem: Problem) -> Layout:
        return problem.kv_layout if self.what == "kv" else problem.q_layout

    def tiles(self, problem: Problem) -> Tiles:
        """Return the tiles that the rank computes: those of all its own rows of the other side."""
        return problem.seen() if self.what == "kv" else problem.seeing()

    def owner(self, tiles: Tiles) -> Ints:
        """Return the rank that owns the moving rows of each tile."""
        return tiles.k_rank if self.what == "kv" else tiles.q_rank

    def receiver(self, tiles: Tiles) -> Ints:
        """Return the rank that computes each tile."""
        return tiles.q_rank if self.what == "kv" else tiles.k_rank

    def shifted(self, bands: Table, by: Ints) -> Table:
        """Return the bands with these rows shifted by ``by``."""
        moved = bands.copy()
        moved[:, self.rows] += by[:, None]
        moved[:, [LO, HI]] += self.slant * by[:, None]
        return moved

    def task(self, slot: int, bands: tuple[Band, ...], tokens: SlotTokens | None) -> Task:
        """Return a task between the rank's own rows of the other side and the rows of the slot, which hold these
        tokens."""
        if self.what == "kv":
            return Task(kv_slot=slot, bands=bands, kv_tokens=tokens)
        return Task(q_slot=slot, kv_slot=0, bands=bands, q_tokens=tokens)

    def incoming(self, problem: Problem, tiles: Tiles) -> RowRanges:
        """Return the rows of other ranks that the rank's tiles need, and no others."""
        owner, start, stop = union(self.owner(tiles), *tiles.bands[:, self.rows].T)
        away = owner != problem.rank
        return RowRanges(*(x[away] for x in (owner, np.full_like(owner, problem.rank), start, stop)))

    def outgoing(self, problem: Problem) -> RowRanges:
        """Return the rank's own rows that the tiles of other ranks need, and no others."""
        tiles = problem.seeing() if self.what == "kv" else problem.seen()
        receiver, start, stop = union(tiles.q_rank if self.what == "kv" else tiles.k_rank, *tiles.bands[:, self.rows].T)
        others = receiver != problem.rank
        return RowRanges(*(x[others] for x in (np.full_like(receiver, problem.rank), receiver, start, stop)))


KEYS = MovingSide(what="kv", returned={"forward": None, "backward": "dkv"}, rows=(K0, K1), slant=1)
QUERIES = MovingSide(what="q", returned={"forward": "out", "backward": "dq"}, rows=(Q0, Q1), slant=-1)
