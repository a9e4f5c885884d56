"""Who travels, keys or queries, and which rows of them: what a planner asks so that it need not be written twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringspan.layouts import Layout, Tiles
from ringspan.masks import Band
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1, Table
from ringspan.plans.data import Phase, Task, What
from ringspan.plans.problem import Ints, Problem, union
from ringspan.plans.slot_tokens import SlotTokens


class RowRanges(NamedTuple):
    """Rows that travel: those of rank ``of`` from start to stop, for rank ``by``. Sorted by both, then by rows."""

    of: Ints
    by: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingSide:
    """What leaves home, what of it has to come back in each direction, and where a band speaks of it."""

    what: What
    back: dict[Phase, What | None]
    rows: tuple[int, int]  # the columns of a band with its first and last row
    slant: int  # what k - q becomes larger by when the rows lie one further on

    def layout(self, problem: Problem) -> Layout:
        return problem.kv_layout if self.what == "kv" else problem.q_layout

    def tiles(self, problem: Problem) -> Tiles:
        """What the rank computes: it stays at home, and all that it sees (or that sees it) comes."""
        return problem.seen() if self.what == "kv" else problem.seeing()

    def owner(self, tiles: Tiles) -> Ints:
        return tiles.k_rank if self.what == "kv" else tiles.q_rank

    def shifted(self, bands: Table, by: Ints) -> Table:
        """The bands where the rows lie ``by`` further on."""
        moved = bands.copy()
        moved[:, self.rows] += by[:, None]
        moved[:, [LO, HI]] += self.slant * by[:, None]
        return moved

    def task(self, slot: int, bands: tuple[Band, ...], tokens: SlotTokens | None) -> Task:
        """Attend between the rank's own rows of the other side and the rows in the slot, which are of these tokens."""
        if self.what == "kv":
            return Task(kv_slot=slot, bands=bands, kv_tokens=tokens)
        return Task(q_slot=slot, kv_slot=0, bands=bands, q_tokens=tokens)

    def incoming(self, problem: Problem, tiles: Tiles) -> RowRanges:
        """Just the rows of others that the rank's tiles need."""
        owner, start, stop = union(self.owner(tiles), *tiles.bands[:, self.rows].T)
        away = owner != problem.rank
        return RowRanges(*(x[away] for x in (owner, np.full_like(owner, problem.rank), start, stop)))

    def outgoing(self, problem: Problem) -> RowRanges:
        """Just the rank's own rows that the tiles of others need."""
        theirs = problem.seeing() if self.what == "kv" else problem.seen()
        asker, start, stop = union(theirs.q_rank if self.what == "kv" else theirs.k_rank, *theirs.bands[:, self.rows].T)
        others = asker != problem.rank
        return RowRanges(*(x[others] for x in (np.full_like(asker, problem.rank), asker, start, stop)))


KEYS = MovingSide(what="kv", back={"forward": None, "backward": "dkv"}, rows=(K0, K1), slant=1)
QUERIES = MovingSide(what="q", back={"forward": "out", "backward": "dq"}, rows=(Q0, Q1), slant=-1)
