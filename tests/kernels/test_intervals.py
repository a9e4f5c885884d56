"""Layers of intervals: together they contain every pair once, and there are no more of them than necessary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

import ringspan as rs
from ringspan.kernels.intervals import IntervalLayer, interval_layers
from tests.dense_masks import Dense
from tests.hypothesis_strategies import Drawn, masks


def dense(layer: IntervalLayer, rows: int, cols: int) -> Dense:
    """Return which pairs of ``rows × cols`` are in a layer, by its definition."""
    out = np.zeros((rows, cols), dtype=np.bool_)
    k = np.arange(layer.k1 - layer.k0)[None, :]
    out[layer.q0 : layer.q1, layer.k0 : layer.k1] = (layer.start[:, None] <= k) & (k < layer.stop[:, None])
    return out


@given(masks())
def test_every_pair_is_in_one_layer(drawn: Drawn) -> None:
    count = np.zeros(drawn.truth.shape, dtype=np.int64)
    for layer in interval_layers(drawn.mask.bands):
        count += dense(layer, *drawn.truth.shape)
    assert np.array_equal(count, drawn.truth)


@given(masks())
def test_no_more_layers_than_the_row_with_the_most_intervals_has(drawn: Drawn) -> None:
    padded = np.pad(drawn.truth, ((0, 0), (1, 0)))
    begins = padded[:, 1:] & ~padded[:, :-1]
    assert len(list(interval_layers(drawn.mask.bands))) == begins.sum(1).max(initial=0)


@given(masks())
def test_the_rectangle_of_a_layer_is_tight(drawn: Drawn) -> None:
    for layer in interval_layers(drawn.mask.bands):
        q, k = np.nonzero(dense(layer, *drawn.truth.shape))
        assert (layer.q0, layer.q1, layer.k0, layer.k1) == (q.min(), q.max() + 1, k.min(), k.max() + 1)


N = 4096
MANY = rs.documents([7, 1, 50] * 70)
CASES = {
    "causal": (rs.causal(N), 1),
    "window": (rs.causal(N) & rs.window(left=100), 1),
    "documents": (MANY, 1),
    "documents with a window": (MANY & rs.window(left=5), 1),
    "prefix: a rectangle beside a triangle": (rs.prefix(N, 200), 1),
    "a hole on the diagonal": (~(rs.full(N) & rs.window(left=5, right=5)), 2),
    "nothing": (rs.full(N) - rs.full(N), 0),
}


@pytest.mark.parametrize(("mask", "count"), CASES.values(), ids=CASES)
def test_number_of_layers(mask: rs.Mask, count: int) -> None:
    assert len(list(interval_layers(mask.bands))) == count
