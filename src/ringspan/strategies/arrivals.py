"""Rows that the ranks receive from others, of all ranks at once: their messages, and the bands in rows of the slots.

``incoming_rows.py`` does the same for one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.costs.workload import Workload
from ringspan.layouts import Layout, Tiles
from ringspan.masks import Mask
from ringspan.masks import table as tables
from ringspan.plans.columns import Messages, Tasks
from ringspan.plans.data import PayloadKind
from ringspan.plans.moving_side import MovingSide, RowRanges
from ringspan.plans.problem import Ints, union, whole_tiles
from ringspan.strategies.incoming_rows import LONG_RANGE, MAX_LONG_RANGES, UNPACKED_RANGES, assign_slot_rows, split_at_spans


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
        """Return the messages of :func:`ringspan.strategies.incoming_rows.by_peer`. Those that are not packed are one
        entry for each pair of ranks."""
        pair, size = (self.receiver << 32) + self.owner, self.stop - self.start
        _, pair_of, number = np.unique(pair, return_inverse=True, return_counts=True)
        long = np.bincount(pair_of, weights=size >= LONG_RANGE, minlength=len(number))
        is_short = (number[pair_of] > UNPACKED_RANGES) & ((size < LONG_RANGE) | (long[pair_of] > MAX_LONG_RANGES))
        order = np.lexsort((is_short, pair))
        size, key = size[order], 2 * pair[order] + is_short[order]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        hashed = _hash((self.start[order] << 32) + self.stop[order])
        rows, digest = (np.add.reduceat(x, first) if len(first) else x for x in (size, hashed))
        ranges = np.diff(first, append=len(key))
        is_packed = is_short[order][first] & (ranges > 1)
        columns = (self.owner[order][first], self.receiver[order][first], self.stage[order][first], rows, digest)
        return RowMessages(*columns, np.where(is_packed, 1, ranges), is_packed)

    def tasks(self, workload: Workload, moving: MovingSide, slots: Ints) -> Tasks:
        """Return the tasks of all ranks: own rows in step 0, the rows of a stage in the step after it.

        ``slots`` are the slots of the stages.
        """
        mask, q_layout, kv_layout, steps = workload.mask, workload.q_layout, workload.kv_layout, self.stages + 1
        (bands, rank), tiles = joined_own_bands(mask, q_layout, kv_layout), whole_tiles(mask, q_layout, kv_layout)
        group = rank * steps
        away = np.flatnonzero(tiles.q_rank != tiles.k_rank)
        if len(away):
            owner, receiver, of_others = moving.owner(tiles)[away], moving.receiver(tiles)[away], tiles.bands[away]
            # Ranks are fewer than 2**15, and rows than 2**32.
            begins = ((self.receiver * workload.world + self.owner) << 32) + self.start
            first_row = ((receiver * workload.world + owner) << 32) + of_others[:, moving.rows[0]]
            hit = begins.searchsorted(first_row, side="right") - 1
            shifted = moving.shifted(of_others, self.slot_row[hit] - self.start[hit])
            arrived, in_step = tables.coalesce_grouped(shifted, receiver * steps + self.stage[hit] + 1)
            group = np.concatenate([group, in_step])
            order = np.argsort(group, kind="stable")
            bands, group = np.concatenate([bands, arrived])[order], group[order]
        first = np.flatnonzero(np.diff(group, prepend=-1))
        rank, step = np.divmod(group[first], steps)
        slot = np.append(0, slots)[step]
        is_query = moving.what == "q"
        return Tasks(rank, step, slot * is_query, slot * (not is_query), bands, first)


class RowMessages(NamedTuple):
    """The rows from each owner to each receiver: one packed message, or ``transfers`` messages that are not packed. Those
    with the same rows of an owner have the same ``digest``."""

    owner: Ints
    receiver: Ints
    stage: Ints
    rows: Ints
    digest: Ints
    transfers: Ints
    is_packed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

    def inputs(self, what: PayloadKind, step: Ints, *, sender: Ints | None = None) -> Messages:
        """Return the messages from the owners, or from other senders, to the receivers."""
        sender = self.owner if sender is None else sender
        packed = np.flatnonzero(self.is_packed)
        keys = np.stack([self.digest, self.owner, sender, step])[:, packed]
        order = np.lexsort(keys)
        is_new = (np.diff(keys[:, order], axis=1) != 0).any(axis=0)
        packs = np.zeros_like(self.rows)
        packs[packed[order]] = np.append(np.ones(min(1, len(packed)), dtype=np.int64), is_new)
        is_packed = self.is_packed.astype(np.int64)
        return Messages(what, sender, self.receiver, step, self.rows, self.transfers, is_packed, packs)

    def results(self, what: PayloadKind, step: Ints, *, receiver: Ints | None = None) -> Messages:
        """Return the messages in the other direction. Outputs are always packed."""
        receiver = self.owner if receiver is None else receiver
        is_packed = (self.is_packed | (what == "out")).astype(np.int64)
        return Messages(what, self.receiver, receiver, step, self.rows, self.transfers, is_packed, is_packed)


def _hash(values: Ints) -> Ints:
    """Return well-mixed integers, whose sums are hardly ever equal for different sets of values."""
    mixed = values.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finalizer of splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).astype(np.int64)


@cache_by_digest(8)
def joined_own_bands(mask: Mask, q_layout: Layout, kv_layout: Layout) -> tuple[tables.Table, Ints]:
    """Return the bands between the own queries and the own keys of all ranks, joined, and their ranks, in order."""
    tiles = whole_tiles(mask, q_layout, kv_layout)
    own = np.flatnonzero(tiles.q_rank == tiles.k_rank)
    return tables.coalesce_grouped(tiles.bands[own], tiles.q_rank[own])


def needed_ranges(tiles: Tiles, moving: MovingSide, world: int) -> RowRanges:
    """Return the rows of other ranks that the tiles of each rank need, and no others."""
    pair, start, stop = union(moving.receiver(tiles) * world + moving.owner(tiles), *tiles.bands[:, moving.rows].T)
    receiver, owner = np.divmod(pair, world)
    away = receiver != owner
    return RowRanges(owner[away], receiver[away], start[away], stop[away])
