"""Arcs of a necklace against the same written out token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringspan.layouts.balanced.ring import Necklace
from ringspan.layouts.balanced.work import Profile
from ringspan.layouts.layout import Ints
from tests.hypothesis_strategies import Drawn, masks


class Strung(NamedTuple):
    necklace: Necklace
    tokens: list[int]
    work: Ints  # of each token of the sequence


@st.composite
def strung(draw: st.DrawFn) -> Strung:
    """Some pieces of a sequence, and the tokens as they should lie on the string: pieces from light to heavy."""
    drawn: Drawn = draw(masks(30, square=True, leaves=3).filter(lambda drawn: len(drawn.truth) > 1))
    n, work = len(drawn.truth), drawn.truth.sum(axis=1)
    cuts = sorted({0, n, *draw(st.lists(st.integers(1, n - 1), max_size=6))})
    pieces = [list(range(*piece)) for piece in pairwise(cuts)]
    pieces = pieces[draw(st.integers(0, len(pieces) - 1)) :]
    start, stop = (np.array(ends, dtype=np.int64) for ends in zip(*((p[0], p[-1] + 1) for p in pieces), strict=True))
    pieces.sort(key=lambda p: (work[p].sum() // len(p), p[0]))
    return Strung(Necklace.of(Profile(drawn.mask), start, stop), [token for piece in pieces for token in piece], work)


@given(strung(), st.data())
def test_an_arc(made: Strung, data: st.DataObject) -> None:
    necklace, tokens, work = made
    assert (necklace.tokens, necklace.work) == (len(tokens), work[tokens].sum())
    place = data.draw(st.integers(0, len(tokens) - 1))
    size = data.draw(st.integers(0, len(tokens)))
    arc = [*tokens, *tokens][place : place + size]
    assert necklace.token_at(np.array([place]))[1].tolist() == [tokens[place]]
    assert necklace.work_of(np.array([place]), np.array([size])).tolist() == [work[arc].sum()]
    start, stop, rest = necklace.take(place, size)
    taken = [token for piece in zip(start.tolist(), stop.tolist(), strict=True) for token in range(*piece)]
    assert sorted(taken) == sorted(arc)
    assert len(start) <= len(necklace.start) + 2
    assert (rest.tokens, rest.work) == (len(tokens) - size, work[tokens].sum() - work[arc].sum())


@given(strung(), st.integers(1, 5))
def test_the_grid_begins_anew_with_every_piece(made: Strung, step: int) -> None:
    necklace = made.necklace
    sizes = (necklace.stop - necklace.start).tolist()
    expected = [edge + i for edge, size in zip(necklace.edge.tolist(), sizes, strict=False) for i in range(0, size, step)]
    assert necklace.grid(step).tolist() == expected
    assert necklace.within_piece(np.array(expected)).tolist() == [i for size in sizes for i in range(0, size, step)]


@given(strung(), st.data())
def test_without_a_piece(made: Strung, data: st.DataObject) -> None:
    piece = data.draw(st.integers(0, len(made.necklace.start) - 1))
    low, high = int(made.necklace.start[piece]), int(made.necklace.stop[piece])
    rest = made.necklace.without(piece)
    assert (rest.tokens, rest.work) == (
        made.necklace.tokens - (high - low),
        made.necklace.work - made.work[low:high].sum(),
    )
