"""Masks cut along layouts, compared with the same rows and columns of the dense mask."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringspan as rs
from ringspan.errors import LayoutError
from ringspan.layouts import LAYOUTS, Layout, areas, balance, cut
from ringspan.masks import Mask
from tests import dense_masks
from tests.dense_masks import Dense
from tests.hypothesis_strategies import Drawn, layouts, masks


class CutCase(NamedTuple):
    drawn: Drawn
    queries: Layout
    keys: Layout


@st.composite
def cut_cases(draw: st.DrawFn) -> CutCase:
    """A mask and a layout of its queries; for its keys the same layout, or any other over any number of ranks."""
    drawn = draw(masks(20, leaves=4))
    queries = draw(layouts(drawn.mask, draw(st.integers(1, 5))))
    square = len(set(drawn.mask.lengths)) == 1
    keys = queries if square and draw(st.booleans()) else draw(layouts(drawn.mask.transposed, draw(st.integers(1, 5))))
    return CutCase(drawn, queries, keys)


def check_cut(mask: Mask, dense: Dense, queries: Layout, keys: Layout) -> None:
    tiles = cut(mask, queries.pieces, keys.pieces)
    for q_rank in range(queries.world):
        for k_rank in range(keys.world):
            between = (tiles.q_rank == q_rank) & (tiles.k_rank == k_rank)
            mine = tiles.bands[between].tolist()
            expected = dense[np.ix_(queries.positions(q_rank), keys.positions(k_rank))]
            assert (dense_masks.times_covered(mine, *expected.shape) == expected).all(), (q_rank, k_rank)
            assert tiles.area[between].sum() == expected.sum()
            for q0, q1, k0, k1, *_ in mine:
                assert 0 <= q0 < q1 <= expected.shape[0]
                assert 0 <= k0 < k1 <= expected.shape[1]


@settings(max_examples=300)
@given(cut_cases())
def test_cut_selects_rows_and_columns(case: CutCase) -> None:
    check_cut(case.drawn.mask, case.drawn.truth, case.queries, case.keys)


@pytest.mark.parametrize("k_world", [3, 4], ids=["3x3", "3x4"])
@pytest.mark.parametrize("k_name", LAYOUTS)
@pytest.mark.parametrize("q_name", LAYOUTS)
def test_cut_for_every_pair_of_layouts(q_name: str, k_name: str, k_world: int) -> None:
    """Packed documents with a window and a shared prefix; then more keys than queries, where the layouts allow it."""
    n = 29
    mask = (rs.documents([9, 0, 13, 7]) & rs.window(left=5)) | (rs.causal(n) & Mask.from_bands([(0, n, 0, 3, -n, n)], n))
    dense = (dense_masks.documents([9, 0, 13, 7], [9, 0, 13, 7]) & dense_masks.window(n, n, 5, None)) | (
        dense_masks.causal(n, n) & dense_masks.cells(n, n, lambda q, k: k < 3)
    )
    check_cut(mask, dense, LAYOUTS[q_name](mask, 3), LAYOUTS[k_name](mask, k_world))
    if "per_document" not in (q_name, k_name):
        cross, dense = rs.causal(17, n, align="end"), dense_masks.causal(17, n, "end")
        check_cut(cross, dense, LAYOUTS[q_name](cross, 3), LAYOUTS[k_name](cross.transposed, k_world))


@given(cut_cases(), st.data())
def test_cut_of_some_ranks_only(case: CutCase, data: st.DataObject) -> None:
    q_rank = data.draw(st.integers(0, case.queries.world - 1))
    k_rank = data.draw(st.integers(0, case.keys.world - 1))
    tiles = cut(case.drawn.mask, case.queries.pieces.of(q_rank), case.keys.pieces.of(k_rank))
    expected = case.drawn.truth[np.ix_(case.queries.positions(q_rank), case.keys.positions(k_rank))]
    assert (set(tiles.q_rank.tolist()), set(tiles.k_rank.tolist())) in (({q_rank}, {k_rank}), (set(), set()))
    assert (dense_masks.times_covered(tiles.bands.tolist(), *expected.shape) == expected).all()


@given(cut_cases())
def test_areas_and_balance_count_the_rows_of_each_rank(case: CutCase) -> None:
    mask, dense = case.drawn
    expected = [int(dense[case.queries.positions(rank)].sum()) for rank in range(case.queries.world)]
    assert areas(mask, case.queries).tolist() == expected
    mean = sum(expected) / len(expected)
    assert balance(mask, case.queries) == pytest.approx(max(expected) / mean if mean else 1.0)


@pytest.mark.parametrize("world", [2, 8, 64])
def test_a_striped_pair_of_ranks_has_one_band_however_long(world: int) -> None:
    mask = rs.causal(10**6)
    pieces = LAYOUTS["striped"](mask, world).pieces
    tiles = cut(mask, pieces, pieces)
    assert len(tiles.bands) == world * world
    assert tiles.area.sum() == mask.area


def test_a_million_tokens_are_cut_by_their_bands() -> None:
    """A thousand documents over 64 ranks: no more tiles than documents and cuts can make."""
    mask = rs.documents([1000] * 1000)
    layout = LAYOUTS["contiguous"](mask, 64)
    tiles = cut(mask, layout.pieces, layout.pieces)
    assert len(tiles.bands) <= 1000 + 3 * 63
    assert tiles.area.sum() == mask.area


def mixed(n: int) -> Layout:
    """Spans of steps 1 and 2."""
    return Layout([[(0, n // 2, 2), (n // 2, n)], [(1, n // 2, 2)]])


@pytest.mark.parametrize("keys", ["contiguous", "mixed"])
def test_spans_of_different_steps_over_too_many_tokens_are_refused(keys: str) -> None:
    """Two layouts in 1.7 KB of a plan file: 2.9 s and 0.4 GB, or an array of 64 GiB."""
    mask = rs.causal(2**20)
    queries = LAYOUTS["striped"](mask, 2) if keys == "contiguous" else mixed(2**20)
    other = queries if keys == "mixed" else LAYOUTS["contiguous"](mask, 2)
    with pytest.raises(LayoutError, match=r"different steps \(1, 2\), so 1,048,57\d tokens .* at most 524,288 are possible"):
        cut(mask, queries.pieces, other.pieces)


def test_tiles_are_counted_before_they_are_made() -> None:
    small, large = rs.causal(2**18), mixed(2**18)
    message = r"1 bands of causal\(262144\) overlap in 8,590,\d+ places, as spans with different steps .* at most 524,288"
    with pytest.raises(LayoutError, match=message.replace("8,590,", r"8,590,\d+,")):
        cut(small, large.pieces, large.pieces)
    documents = rs.documents([256] * 4096)
    striped = LAYOUTS["striped"](documents, 128)
    with pytest.raises(LayoutError, match=r"4,096 bands .* overlap in 67,108,864 places; at most 16,777,216 are possible"):
        cut(documents, striped.pieces, striped.pieces)
    assert len(cut(documents, striped.pieces.of(3), striped.pieces).bands) == 4096 * 128


@pytest.mark.parametrize("world", [3, 64, 1024])
def test_the_areas_of_a_striped_layout_need_no_single_tokens(world: int) -> None:
    """16 million tokens: as single tokens over 1,024 ranks, the pairs took 22 s and 4.6 GB."""
    n = 2**24
    areas_of_causal = areas(rs.causal(n), LAYOUTS["striped"](rs.causal(n), world)).tolist()
    assert areas_of_causal == [sum(range(rank + 1, n + 1, world)) for rank in range(world)]
