"""The tiles and rows that ranks need of each other."""

from __future__ import annotations

import numpy as np
import pytest

import ringspan as rs
from ringspan.layouts import named_layout
from ringspan.plans.problem import estimated_tiles, seen_ranks, whole_tiles
from tests.plans.examples import MASKS, layouts_for


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_seen_ranks_against_the_dense_mask(mask: rs.Mask, world: int) -> None:
    for name in layouts_for(mask):
        q_layout, _ = named_layout(name, mask, world)
        kv_layout, _ = named_layout(name, mask.transposed, world)
        dense = mask.dense()
        shown = [
            [bool(dense[np.ix_(q_layout.positions(q), kv_layout.positions(k))].any()) for k in range(world)]
            for q in range(world)
        ]
        assert seen_ranks(mask, q_layout, kv_layout).tolist() == shown, name


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_estimate_of_tiles_is_an_upper_bound_for_spans_without_gaps(mask: rs.Mask, layout: str) -> None:
    q_layout, _ = named_layout(layout, mask, 3)
    kv_layout, _ = named_layout(layout, mask.transposed, 3)
    tiles = whole_tiles(mask, q_layout, kv_layout)
    assert len(tiles.bands) <= estimated_tiles(mask, q_layout, kv_layout)
