"""Rows that a rank receives from others: their place in its slots, their messages, and the bands in rows of the
slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringspan.layouts import Layout, Tiles
from ringspan.masks import Band
from ringspan.masks import table as tables
from ringspan.plans.moving_side import MovingSide, RowRanges
from ringspan.plans.problem import Ints, Rows, bands_by_group
from ringspan.plans.slot_tokens import START, STEP, STOP, SlotTokens

# Up to this many ranges of rows are sent to a rank as one message each, without packing.
UNPACKED_RANGES = 2
# A range of at least this many rows is a message of its own: with 8 key heads of 128 in bfloat16 it has 1 MiB, and
# copying it twice takes longer than another message.
LONG_RANGE = 256
# If there are more long ranges than this many, all are packed: a message takes time whatever its size, and layouts of
# small blocks have thousands of ranges.
MAX_LONG_RANGES = 16

# The stage of the rank's own rows, which are in slot 0.
OWN = -1


class IncomingRows(NamedTuple):
    """Ranges of other ranks' rows, sorted by owner and row, and where they are received.

    Rows ``start`` to ``stop`` of ``owner`` are received from row ``slot_row`` on of the slot of their ``stage``.
    ``spans`` are their tokens (start, stop, step) stage by stage, in the order of the slots' rows; ``span_stage`` is
    the stage of each.
    """

    owner: Ints
    start: Ints
    stop: Ints
    stage: Ints
    slot_row: Ints
    spans: Ints
    span_stage: Ints

    @property
    def size(self) -> Ints:
        return self.stop - self.start

    def rows(self, stage: int) -> int:
        """Return how many rows a stage has."""
        return int(self.size[self.stage == stage].sum())

    def tokens(self, stage: int) -> SlotTokens:
        """Return the tokens of a stage, in the order of its slot's rows."""
        first, last = self.span_stage.searchsorted((stage, stage + 1)).tolist()
        return SlotTokens(self.spans[first:last])

    def find(self, owner: Ints, row: Ints) -> Ints:
        """Return the index of the range that holds each of these rows of these owners."""
        return ((self.owner << 32) + self.start).searchsorted((owner << 32) + row, side="right") - 1


def assign_slot_rows(rows: RowRanges, token: Ints, step: Ints, stage: Ints) -> IncomingRows:
    """Assign rows of the stages' slots to the incoming rows.

    They are in the order of the whole sequence, so that bands which the layout has split join again.
    """
    order = np.lexsort((token, stage))
    size, ordered = (rows.stop - rows.start)[order], stage[order]
    before = np.cumsum(size) - size
    first = ordered.searchsorted(ordered, side="left")
    at = np.empty_like(before)
    at[order] = before - before[first] if len(before) else before
    spans = np.empty((len(order), 3), dtype=np.int64)
    spans[:, START], spans[:, STEP] = token[order], step[order]
    spans[:, STOP] = spans[:, START] + (size - 1) * spans[:, STEP] + 1
    return IncomingRows(rows.owner, rows.start, rows.stop, stage, at, spans, ordered)


def split_at_spans(layout: Layout, rows: RowRanges) -> tuple[RowRanges, Ints, Ints]:
    """Split ranges of rows at the spans of their owner's tokens.

    Returns the ranges, the first token of each, and the step between its tokens.
    """
    p = layout.pieces
    of, at = rows.owner << 32, (p.owner << 32) + p.at  # rows of different owners never overlap
    i, j = tables.overlapping(of + rows.start, of + rows.stop, at, at + p.size)
    start = np.maximum(rows.start[i], p.at[j])
    stop = np.minimum(rows.stop[i], p.at[j] + p.size[j])
    order = np.lexsort((start, rows.receiver[i], rows.owner[i]))
    cut = RowRanges(*(column[order] for column in (rows.owner[i], rows.receiver[i], start, stop)))
    return cut, (p.start[j] + (start - p.at[j]) * p.step[j])[order], p.step[j][order]


def by_peer(peer: Ints, start: Ints, stop: Ints) -> dict[int, list[Rows]]:
    """Return the rows of the messages to or from each peer.

    Up to ``UNPACKED_RANGES`` ranges of rows are a message each, so that nothing is packed. Of more ranges, those of at
    least ``LONG_RANGE`` rows are a message each, if there are at most ``MAX_LONG_RANGES`` of them, and the others are one
    packed message.

    >>> by_peer(*np.array([[5, 5, 5, 5], [0, 400, 900, 910], [9, 800, 902, 913]]))
    {5: [((400, 800),), ((0, 9), (900, 902), (910, 913))]}
    """
    messages: dict[int, list[Rows]] = {}
    for p, spans in ranges_by_peer(peer, start, stop).items():
        least = 0 if len(spans) <= UNPACKED_RANGES else LONG_RANGE
        alone = [(a, b) for a, b in spans if b - a >= least]
        packed = tuple((a, b) for a, b in spans if b - a < least)
        if len(alone) > MAX_LONG_RANGES:
            alone, packed = [], spans
        messages[p] = [*((span,) for span in alone), *([packed] if packed else [])]
    return messages


def ranges_by_peer(peer: Ints, start: Ints, stop: Ints) -> dict[int, Rows]:
    """Return all ranges of rows to or from each peer."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for p, a, b in zip(peer.tolist(), start.tolist(), stop.tolist(), strict=True):
        ranges.setdefault(p, []).append((a, b))
    return {p: tuple(spans) for p, spans in ranges.items()}


def bands_by_stage(moving: MovingSide, tiles: Tiles, placed: IncomingRows, rank: int) -> dict[int, tuple[Band, ...]]:
    """Return the tiles in rows of the slots instead of rows of the owners, joined, by stage. The rank's own rows have
    stage ``OWN``."""
    owner = moving.owner(tiles)
    if not len(placed.owner):
        return bands_by_group(tiles.bands, np.full_like(owner, OWN))
    hit = placed.find(owner, tiles.bands[:, moving.rows[0]])
    is_own = owner == rank
    shift = np.where(is_own, 0, (placed.slot_row - placed.start)[hit])
    return bands_by_group(moving.shifted(tiles.bands, shift), np.where(is_own, OWN, placed.stage[hit]))
