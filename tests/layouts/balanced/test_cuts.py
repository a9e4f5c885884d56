"""Arcs for a goal: within its limits, at the cost of their ends, and as near as single tokens allow when nothing is within."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.layouts.balanced.cuts import Arc, Goal, Grain, best_arc, nearest_arc
from ringspan.layouts.balanced.ring import Necklace
from ringspan.layouts.balanced.work import Profile
from tests.layouts.balanced.test_ring import Strung, strung


@given(strung(), st.data())
def test_the_best_arc_is_within_the_limits(made: Strung, data: st.DataObject) -> None:
    necklace, tokens, work = made
    size = data.draw(st.integers(1, len(tokens)))
    spare = data.draw(st.integers(0, min(2, size - 1, len(tokens) - size)))
    least = data.draw(st.integers(0, necklace.work))
    most = data.draw(st.integers(least, necklace.work))
    goal = Goal(size - spare, size, size + spare, least, (least + most) // 2, most)
    arc = best_arc(necklace, goal, Grain(block=1, step=1))
    around = [*tokens, *tokens]
    right = [place for place in range(len(tokens)) if least <= work[around[place : place + size]].sum() <= most]
    if arc is None:
        assert spare or not right
        return
    held = int(work[around[arc.place : arc.place + arc.tokens]].sum())
    assert goal.fewest <= arc.tokens <= goal.most
    assert least <= held <= most
    assert arc.off_work == abs(held - goal.work)


@given(strung(), st.data())
def test_the_nearest_arc_is_at_most_a_token_off(made: Strung, data: st.DataObject) -> None:
    """Some arc has no more than the mean over all places, some no less; from one to the next a token comes and one goes."""
    necklace, tokens, work = made
    size = data.draw(st.integers(1, len(tokens)))
    mean = necklace.work * size // len(tokens)
    arc = nearest_arc(necklace, Goal(size, size, size, mean, mean, mean), Grain(block=1, step=1))
    held = int(work[[*tokens, *tokens][arc.place : arc.place + size]].sum())
    assert (arc.tokens, arc.off_work) == (size, abs(held - mean))
    assert arc.off_work <= max(work[tokens].max(), 1)


def test_a_cut_costs_the_keys_that_are_seen_across_it() -> None:
    """Documents of 8 and 8 in blocks of 4: a whole one is free; across half of one 4 keys are seen, and a block is added."""
    necklace = Necklace.of(Profile(rs.documents([8, 8])), np.array([0, 8]), np.array([8, 16]))
    grain = Grain(block=4, step=1)
    assert best_arc(necklace, Goal(8, 8, 8, 36, 36, 36), grain) == Arc(cost=0, off_work=0, place=0, tokens=8)
    assert best_arc(necklace, Goal(4, 4, 4, 10, 10, 10), grain) == Arc(cost=4 + 4, off_work=0, place=0, tokens=4)
    assert best_arc(necklace, Goal(3, 3, 3, 6, 6, 6), grain) == Arc(cost=3 + 2 * 4, off_work=0, place=0, tokens=3)


def test_nothing_is_an_arc_too() -> None:
    necklace = Necklace.of(Profile(rs.causal(4)), np.array([0]), np.array([4]))
    assert best_arc(necklace, Goal(0, 0, 0, -2, 1, 3), Grain(block=1, step=1)) == Arc(0, 1, 0, 0)
    assert best_arc(necklace, Goal(0, 0, 0, 1, 2, 3), Grain(block=1, step=1)) is None
