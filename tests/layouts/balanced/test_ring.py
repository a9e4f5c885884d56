"""Intervals of a ring, compared with a list of its tokens; and several rings together, compared with each alone."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringspan.layouts.balanced.ring import PieceRings
from ringspan.layouts.layout import Ints
from ringspan.layouts.work import WorkProfile
from tests.hypothesis_strategies import Drawn, masks


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


class DrawnRing(NamedTuple):
    ring: PieceRings
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
    ring = PieceRings.of(WorkProfile(drawn.mask), np.zeros_like(start), start, stop, 1)
    return DrawnRing(ring, [token for piece in pieces for token in piece], work)


@given(drawn_rings(), st.data())
def test_an_interval(made: DrawnRing, data: st.DataObject) -> None:
    ring, tokens, work = made
    assert (ring.tokens.tolist(), ring.work.tolist()) == ([len(tokens)], [work[tokens].sum()])
    place = data.draw(st.integers(0, len(tokens) - 1))
    size = data.draw(st.integers(0, len(tokens)))
    interval = [*tokens, *tokens][place : place + size]
    assert ring.token_at(ints(place))[1].tolist() == [tokens[place]]
    assert ring.work_of(ints(place), ints(0), ints(size)).tolist() == [work[interval].sum()]
    ((start, stop),), rest = ring.take(ints(place), ints(size))
    taken = [token for piece in zip(start.tolist(), stop.tolist(), strict=True) for token in range(*piece)]
    assert sorted(taken) == sorted(interval)
    assert len(start) <= len(ring.start) + 2
    assert rest.tokens.tolist() == [len(tokens) - size]
    assert rest.work.tolist() == [work[tokens].sum() - work[interval].sum()]


@given(drawn_rings(), st.integers(1, 5))
def test_the_grid_restarts_at_every_piece(made: DrawnRing, step: int) -> None:
    ring = made.ring
    sizes = (ring.stop - ring.start).tolist()
    expected = [edge + i for edge, size in zip(ring.edge.tolist(), sizes, strict=False) for i in range(0, size, step)]
    assert ring.grid(step)[0].tolist() == expected


@given(drawn_rings(), st.data())
def test_a_copy_without_a_piece(made: DrawnRing, data: st.DataObject) -> None:
    piece = data.draw(st.integers(0, len(made.ring.start) - 1))
    low, high = int(made.ring.start[piece]), int(made.ring.stop[piece])
    both = made.ring.with_copies(ints(piece))
    assert both.tokens.tolist() == [len(made.tokens), len(made.tokens) - (high - low)]
    assert both.work.tolist() == [made.work[made.tokens].sum(), made.work[made.tokens].sum() - made.work[low:high].sum()]


@given(drawn_rings(), st.data())
def test_several_rings_are_each_what_they_are_alone(made: DrawnRing, data: st.DataObject) -> None:
    start, stop, profile = made.ring.start, made.ring.stop, made.ring.profile
    count = data.draw(st.integers(1, 3))
    ring = ints(*data.draw(st.lists(st.integers(0, count - 1), min_size=len(start), max_size=len(start))))
    rings = PieceRings.of(profile, ring, start, stop, count)
    alone = [PieceRings.of(profile, 0 * start[ring == i], start[ring == i], stop[ring == i], 1) for i in range(count)]
    places = ints(*(data.draw(st.integers(0, max(0, int(one.tokens[0]) - 1))) for one in alone))
    sizes = ints(*(data.draw(st.integers(0, int(one.tokens[0]))) for one in alone))
    taken, rest = rings.take(places, sizes)
    chosen = rings.select(np.arange(count)[::-1])
    for i, one in enumerate(alone):
        ((low, high),), left = one.take(places[i : i + 1], sizes[i : i + 1])
        assert [x.tolist() for x in taken[i]] == [low.tolist(), high.tolist()]
        assert rest.select(ints(i)).start.tolist() == left.start.tolist()
        assert chosen.select(ints(count - 1 - i)).start.tolist() == one.start.tolist()
        if len(one.start):
            base, to_work = rings.base[i], (ints(i), sizes[i : i + 1])
            assert rings.work_of(base + places[i : i + 1], *to_work) == one.work_of(places[i : i + 1], ints(0), to_work[1])
            assert rings.wrapped(base + ints(-1), ints(i)) == base + one.wrapped(ints(-1), ints(0))
