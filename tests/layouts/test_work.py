"""The work profile of a mask, compared with counts in the dense mask."""

from __future__ import annotations

import numpy as np
from hypothesis import given

import ringspan as rs
from ringspan.layouts.work import WorkProfile
from tests.dense_masks import Dense
from tests.hypothesis_strategies import Drawn, masks


@given(masks(24))
def test_work_before_a_token(drawn: Drawn) -> None:
    rows = drawn.truth.sum(axis=1)
    token = np.arange(len(rows) + 1)
    assert WorkProfile(drawn.mask).work_before(token).tolist() == [int(rows[:t].sum()) for t in token]


def seen_across(truth: Dense, cut: int) -> int:
    """The distance from the cut to the furthest key visible across it, both sides together."""
    below = np.flatnonzero(truth[cut:, :cut].any(axis=0))
    above = np.flatnonzero(truth[:cut, cut:].any(axis=0))
    return (cut - int(below.min()) if len(below) else 0) + (int(above.max()) + 1 if len(above) else 0)


@given(masks(24, square=True))
def test_keys_seen_across_a_cut(drawn: Drawn) -> None:
    token = np.arange(len(drawn.truth) + 1)
    assert WorkProfile(drawn.mask).seen_across(token).tolist() == [seen_across(drawn.truth, t) for t in token]


def test_no_keys_are_seen_across_cuts_of_different_sequences() -> None:
    assert WorkProfile(rs.full(3, 5)).seen_across(np.arange(4)).tolist() == [0, 0, 0, 0]


def test_the_longest_sequence() -> None:
    n = 2**31 - 1
    assert WorkProfile(rs.causal(n)).work_before(np.array([0, 1, n - 1, n])).tolist() == [
        0,
        1,
        n * (n - 1) // 2,
        n * (n + 1) // 2,
    ]
