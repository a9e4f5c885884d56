"""Intervals for a goal: within its limits, at the lowest cost; if there are none, the nearest in work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.layouts.balanced.cuts import Goal, Resolution, RingInterval, best_intervals, nearest_interval
from ringspan.layouts.balanced.ring import PieceRings
from ringspan.layouts.work import WorkProfile
from tests.layouts.balanced.test_ring import DrawnRing, drawn_rings, ints


def best_interval(ring: PieceRings, goal: Goal, resolution: Resolution) -> RingInterval | None:
    return best_intervals(ring, [goal], resolution)[0]


@given(drawn_rings(), st.data())
def test_the_best_interval_is_within_the_limits(made: DrawnRing, data: st.DataObject) -> None:
    ring, tokens, work = made
    size = data.draw(st.integers(1, len(tokens)))
    spare = data.draw(st.integers(0, min(2, size - 1, len(tokens) - size)))
    least = data.draw(st.integers(0, int(ring.work[0])))
    most = data.draw(st.integers(least, int(ring.work[0])))
    goal = Goal(size - spare, size, size + spare, least, (least + most) // 2, most)
    interval = best_interval(ring, goal, Resolution(block=1, step=1))
    around = [*tokens, *tokens]
    right = [place for place in range(len(tokens)) if least <= work[around[place : place + size]].sum() <= most]
    if interval is None:
        assert spare or not right
        return
    held = int(work[around[interval.place : interval.place + interval.tokens]].sum())
    assert goal.fewest <= interval.tokens <= goal.most
    assert least <= held <= most
    assert interval.off_work == abs(held - goal.work)


@given(drawn_rings(), st.data())
def test_the_nearest_interval_is_at_most_a_token_off(made: DrawnRing, data: st.DataObject) -> None:
    """Some interval has at most the mean work, some at least; moving by one token adds a token and removes one."""
    ring, tokens, work = made
    size = data.draw(st.integers(1, len(tokens)))
    mean = int(ring.work[0]) * size // len(tokens)
    interval = nearest_interval(ring, 0, Goal(size, size, size, mean, mean, mean), Resolution(block=1, step=1))
    held = int(work[[*tokens, *tokens][interval.place : interval.place + size]].sum())
    assert (interval.tokens, interval.off_work) == (size, abs(held - mean))
    assert interval.off_work <= max(work[tokens].max(), 1)


def test_a_cut_costs_the_keys_that_are_seen_across_it() -> None:
    """Two documents of 8, blocks of 4: a whole document costs nothing, half of one 4 keys across the cut and a
    block."""
    ring = PieceRings.of(WorkProfile(rs.documents([8, 8])), ints(0, 0), ints(0, 8), ints(8, 16), 1)
    resolution = Resolution(block=4, step=1)
    assert best_interval(ring, Goal(8, 8, 8, 36, 36, 36), resolution) == RingInterval(cost=0, off_work=0, place=0, tokens=8)
    assert best_interval(ring, Goal(4, 4, 4, 10, 10, 10), resolution) == RingInterval(cost=4 + 4, off_work=0, place=0, tokens=4)
    assert best_interval(ring, Goal(3, 3, 3, 6, 6, 6), resolution) == RingInterval(
        cost=3 + 2 * 4, off_work=0, place=0, tokens=3
    )


def test_an_empty_interval() -> None:
    ring = PieceRings.of(WorkProfile(rs.causal(4)), ints(0), ints(0), ints(4), 1)
    assert best_interval(ring, Goal(0, 0, 0, -2, 1, 3), Resolution(block=1, step=1)) == RingInterval(0, 1, 0, 0)
    assert best_interval(ring, Goal(0, 0, 0, 1, 2, 3), Resolution(block=1, step=1)) is None


@given(drawn_rings(), st.data())
def test_rings_that_are_searched_together(made: DrawnRing, data: st.DataObject) -> None:
    """Each gets the interval that it gets alone."""
    count = data.draw(st.integers(2, 3))
    ring = ints(*data.draw(st.lists(st.integers(0, count - 1), min_size=len(made.ring.start), max_size=len(made.ring.start))))
    rings = PieceRings.of(made.ring.profile, ring, made.ring.start, made.ring.stop, count)
    goals = []
    for tokens, work in zip(rings.tokens.tolist(), rings.work.tolist(), strict=True):
        size = data.draw(st.integers(0, tokens))
        spare = data.draw(st.integers(0, min(2, size, tokens - size)))
        least = data.draw(st.integers(0, work))
        most = data.draw(st.integers(least, work))
        goals.append(Goal(size - spare, size, size + spare, least, (least + most) // 2, most))
    resolution = Resolution(block=data.draw(st.integers(1, 4)), step=data.draw(st.integers(1, 4)))
    alone = [best_interval(rings.select(ints(i)), goal, resolution) for i, goal in enumerate(goals)]
    assert best_intervals(rings, goals, resolution) == alone
