"""Rows of other ranks in a rank's slots: where they are received, in which messages, and the bands in the slot's
rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringspan.layouts import Layout, Tiles
from ringspan.masks import Band
from ringspan.masks import table as tables
from ringspan.plans.moving_side import MovingSide, RowRanges
from ringspan.plans.problem import Ints, Rows, bands_by_group
from ringspan.plans.slot_tokens import SlotTokens, slot_tokens

# Up to so many ranges of rows are sent as a message each.
UNPACKED_RANGES = 2

HOME = -1


class IncomingRows(NamedTuple):
    """Ranges of other ranks' rows, in the order of their owners' rows, and where they are received.

    Rows ``start`` to ``stop`` of ``owner`` are received from row ``at`` on of the slot of their ``stage``. They hold
    the tokens ``token``, ``token + step``, …
    """

    owner: Ints
    start: Ints
    stop: Ints
    stage: Ints
    at: Ints
    token: Ints
    step: Ints

    @property
    def size(self) -> Ints:
        return self.stop - self.start

    def rows(self, stage: int) -> int:
        """How many rows a stage has."""
        return int(self.size[self.stage == stage].sum())

    def tokens(self, stage: int) -> SlotTokens:
        """The tokens of a stage, in the order of its slot's rows."""
        there = np.flatnonzero(self.stage == stage)
        there = there[np.argsort(self.at[there])]
        return slot_tokens(self.token[there], self.size[there], self.step[there])

    def find(self, owner: Ints, row: Ints) -> Ints:
        """The index of the range that holds each of these rows of these owners."""
        key = (self.owner << 32) + self.start
        order = np.argsort(key)
        return order[np.searchsorted(key[order], (owner << 32) + row, side="right") - 1]


def lay_out(rows: RowRanges, token: Ints, step: Ints, stage: Ints) -> IncomingRows:
    """Assign rows of the stages' slots, in the order of the whole sequence, so that bands which a layout has cut join
    again."""
    order = np.lexsort((token, stage))
    size = (rows.stop - rows.start)[order]
    before = np.cumsum(size) - size
    first = np.searchsorted(stage[order], stage[order], side="left")
    at = np.empty_like(before)
    at[order] = before - before[first] if len(before) else before
    return IncomingRows(rows.owner, rows.start, rows.stop, stage, at, token, step)


def by_token(layout: Layout, rows: RowRanges) -> tuple[RowRanges, Ints, Ints]:
    """The rows cut at the spans of their owner's tokens, with the first token of each range and the step between
    tokens."""
    p = layout.pieces
    of, at = rows.owner << 32, (p.owner << 32) + p.at  # rows of different owners never overlap
    i, j = tables.overlapping(of + rows.start, of + rows.stop, at, at + p.size)
    start = np.maximum(rows.start[i], p.at[j])
    stop = np.minimum(rows.stop[i], p.at[j] + p.size[j])
    order = np.lexsort((start, rows.receiver[i], rows.owner[i]))
    cut = RowRanges(*(column[order] for column in (rows.owner[i], rows.receiver[i], start, stop)))
    return cut, (p.start[j] + (start - p.at[j]) * p.step[j])[order], p.step[j][order]


def by_peer(peer: Ints, start: Ints, stop: Ints, *, apart: int = UNPACKED_RANGES) -> dict[int, list[Rows]]:
    """The messages to or from each peer: one for each range of rows if there are at most ``apart``, so that nothing is
    packed; else one packed message."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for p, a, b in zip(peer.tolist(), start.tolist(), stop.tolist(), strict=True):
        ranges.setdefault(p, []).append((a, b))
    return {p: [(span,) for span in spans] if len(spans) <= apart else [tuple(spans)] for p, spans in ranges.items()}


def bands_by_stage(moving: MovingSide, tiles: Tiles, placed: IncomingRows, rank: int) -> dict[int, tuple[Band, ...]]:
    """The tiles in the rows of the slots instead of their owners' rows, joined. The rank's own rows have stage
    ``HOME``."""
    zero = np.array([0])
    home = np.array([rank]), zero, zero, np.array([HOME]), zero, zero, zero
    with_own = IncomingRows(*(np.append(column, own) for column, own in zip(placed, home, strict=True)))
    hit = with_own.find(moving.owner(tiles), tiles.bands[:, moving.rows[0]])
    shift = (with_own.at - with_own.start)[hit]
    return bands_by_group(moving.shifted(tiles.bands, shift), with_own.stage[hit])
