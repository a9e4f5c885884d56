"""Rows that the ranks receive from others, of all ranks at once: their messages, and the bands in rows of the slots.

``incoming_rows.py`` does the same for one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringspan.layouts import Layout, Tiles
from ringspan.masks import table as tables
from ringspan.plans.columns import Messages, Tasks
from ringspan.plans.data import PayloadKind
from ringspan.plans.moving_side import MovingSide, RowRanges
from ringspan.plans.problem import Ints, union
from ringspan.strategies.incoming_rows import UNPACKED_RANGES, assign_slot_rows, split_at_spans


class Arrivals(NamedTuple):
    """Rows ``start`` to ``stop`` of ``owner`` that ``receiver`` receives, from row ``slot_row`` on of the slot of their
    ``stage``. Sorted by receiver, owner and start. ``stages`` is the number of stages."""

    owner: Ints
    receiver: Ints
    start: Ints
    stop: Ints
    stage: Ints
    slot_row: Ints
    stages: int

    @staticmethod
    def of(layout: Layout, rows: RowRanges, stage_of: Ints, stages: int) -> Arrivals:
        """Split ranges of rows at the spans of their owners' tokens, and assign rows of the slots to them.

        ``stage_of`` is a matrix: the stage in which rank ``row`` receives the rows of rank ``column``.
        """
        cut, token, step = split_at_spans(layout, rows)
        stage = stage_of[cut.receiver, cut.owner]
        placed = assign_slot_rows(cut, token, step, cut.receiver * stages + stage)
        order = np.lexsort((cut.start, cut.owner, cut.receiver))
        columns = (cut.owner, cut.receiver, cut.start, cut.stop, stage, placed.slot_row)
        owner, receiver, start, stop, stage, slot_row = (column[order] for column in columns)
        return Arrivals(owner, receiver, start, stop, stage, slot_row, stages)

    def rows_by_stage(self, world: int) -> Ints:
        """Return how many rows each rank receives in each stage."""
        total = np.bincount(
            self.receiver * self.stages + self.stage, weights=self.stop - self.start, minlength=world * self.stages
        )
        return total.astype(np.int64).reshape(world, self.stages)

    def messages(self) -> RowMessages:
        pair = (self.receiver << 32) + self.owner
        first = np.flatnonzero(np.diff(pair, prepend=-1))
        size = self.stop - self.start
        rows = np.add.reduceat(size, first) if len(first) else size
        ranges = np.diff(first, append=len(pair))
        return RowMessages(self.owner[first], self.receiver[first], self.stage[first], rows, ranges > UNPACKED_RANGES)

    def tasks(self, tiles: Tiles, moving: MovingSide, slots: Ints) -> Tasks:
        """Return the tasks of all ranks: own rows in step 0, the rows of a stage in the step after it.

        ``slots`` are the slots of the stages.
        """
        owner, receiver = moving.owner(tiles), moving.receiver(tiles)
        stage, bands = np.full_like(owner, -1), tiles.bands
        away = np.flatnonzero(owner != receiver)
        if len(away):
            # Ranks are fewer than 2**15, and rows than 2**32.
            world = 1 + max(int(owner.max()), int(receiver.max()), int(self.owner.max()), int(self.receiver.max()))
            begins = ((self.receiver * world + self.owner) << 32) + self.start
            first_row = tiles.bands[away, moving.rows[0]]
            hit = begins.searchsorted(((receiver[away] * world + owner[away]) << 32) + first_row, side="right") - 1
            shift = np.zeros_like(owner)
            shift[away] = self.slot_row[hit] - self.start[hit]
            stage[away], bands = self.stage[hit], moving.shifted(tiles.bands, shift)
        steps = self.stages + 1
        bands, group = tables.coalesce_grouped(bands, receiver * steps + stage + 1)
        first = np.flatnonzero(np.diff(group, prepend=-1))
        rank, step = np.divmod(group[first], steps)
        slot = np.append(0, slots)[step]
        is_query = moving.what == "q"
        return Tasks(rank, step, slot * is_query, slot * (not is_query), bands, first)


class RowMessages(NamedTuple):
    """A message for each owner of rows and each receiver."""

    owner: Ints
    receiver: Ints
    stage: Ints
    rows: Ints
    is_packed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

    def inputs(self, what: PayloadKind, step: Ints, *, sender: Ints | None = None) -> Messages:
        """Return the messages from the owners, or from other senders, to the receivers."""
        sender = self.owner if sender is None else sender
        return Messages(what, sender, self.receiver, step, self.rows, self.is_packed.astype(np.int64))

    def results(self, what: PayloadKind, step: Ints, *, receiver: Ints | None = None) -> Messages:
        """Return the messages in the other direction. Outputs are always packed."""
        receiver = self.owner if receiver is None else receiver
        return Messages(what, self.receiver, receiver, step, self.rows, (self.is_packed | (what == "out")).astype(np.int64))


def needed_ranges(tiles: Tiles, moving: MovingSide, world: int) -> RowRanges:
    """Return the rows of other ranks that the tiles of each rank need, and no others."""
    pair, start, stop = union(moving.receiver(tiles) * world + moving.owner(tiles), *tiles.bands[:, moving.rows].T)
    receiver, owner = np.divmod(pair, world)
    away = receiver != owner
    return RowRanges(owner[away], receiver[away], start[away], stop[away])
