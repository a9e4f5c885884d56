"""Intervals of a ring, compared with a list of its tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringspan.layouts.balanced.ring import PieceRing
from ringspan.layouts.balanced.work import WorkProfile
from ringspan.layouts.layout import Ints
from tests.hypothesis_strategies import Drawn, masks


class DrawnRing(NamedTuple):
    ring: PieceRing
    tokens: list[int]
    work: Ints  # of each token of the sequence


@st.composite
def drawn_rings(draw: st.DrawFn) -> DrawnRing:
    """Some pieces of a sequence, and its tokens in ring order: pieces by ascending work per token."""
    drawn: Drawn = draw(masks(30, square=True, leaves=3).filter(lambda drawn: len(drawn.truth) > 1))
    n, work = len(drawn.truth), drawn.truth.sum(axis=1)
    cuts = sorted({0, n, *draw(st.lists(st.integers(1, n - 1), max_size=6))})
    pieces = [list(range(*piece)) for piece in pairwise(cuts)]
    pieces = pieces[draw(st.integers(0, len(pieces) - 1)) :]
    start, stop = (np.array(ends, dtype=np.int64) for ends in zip(*((p[0], p[-1] + 1) for p in pieces), strict=True))
    pieces.sort(key=lambda p: (work[p].sum() // len(p), p[0]))
    return DrawnRing(PieceRing.of(WorkProfile(drawn.mask), start, stop), [token for piece in pieces for token in piece], work)


@given(drawn_rings(), st.data())
def test_an_interval(made: DrawnRing, data: st.DataObject) -> None:
    ring, tokens, work = made
    assert (ring.tokens, ring.work) == (len(tokens), work[tokens].sum())
    place = data.draw(st.integers(0, len(tokens) - 1))
    size = data.draw(st.integers(0, len(tokens)))
    interval = [*tokens, *tokens][place : place + size]
    assert ring.token_at(np.array([place]))[1].tolist() == [tokens[place]]
    assert ring.work_of(np.array([place]), np.array([size])).tolist() == [work[interval].sum()]
    start, stop, rest = ring.take(place, size)
    taken = [token for piece in zip(start.tolist(), stop.tolist(), strict=True) for token in range(*piece)]
    assert sorted(taken) == sorted(interval)
    assert len(start) <= len(ring.start) + 2
    assert (rest.tokens, rest.work) == (len(tokens) - size, work[tokens].sum() - work[interval].sum())


@given(drawn_rings(), st.integers(1, 5))
def test_the_grid_restarts_at_every_piece(made: DrawnRing, step: int) -> None:
    ring = made.ring
    sizes = (ring.stop - ring.start).tolist()
    expected = [edge + i for edge, size in zip(ring.edge.tolist(), sizes, strict=False) for i in range(0, size, step)]
    assert ring.grid(step).tolist() == expected
    assert ring.within_piece(np.array(expected)).tolist() == [i for size in sizes for i in range(0, size, step)]


@given(drawn_rings(), st.data())
def test_without_a_piece(made: DrawnRing, data: st.DataObject) -> None:
    piece = data.draw(st.integers(0, len(made.ring.start) - 1))
    low, high = int(made.ring.start[piece]), int(made.ring.stop[piece])
    rest = made.ring.without(piece)
    assert (rest.tokens, rest.work) == (
        made.ring.tokens - (high - low),
        made.ring.work - made.work[low:high].sum(),
    )
