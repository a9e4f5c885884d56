"""The algebra of tables of bands, compared with dense arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.errors import MaskError
from ringspan.masks import Mask
from ringspan.masks import table as tables
from ringspan.masks.table import K0, Q0, Table
from tests import dense_masks
from tests.hypothesis_strategies import Drawn, masks, raw_bands, trees

N = 10

raw = raw_bands(N, N, max_size=6)
two_masks = st.tuples(trees(N, N, leaves=3), trees(N, N, leaves=3))
intervals = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), max_size=8)


def as_table(rows: list[tuple[int, ...]]) -> Table:
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def assert_tight(t: Table) -> None:
    """No empty band, no empty row or column, and diagonals that touch the rectangle's cells."""
    for row in t.tolist():
        q0, q1, k0, k1, lo, hi = row
        # shifted to the right and down, so that bands with negative coordinates are counted too
        cells = dense_masks.band([q0 + 9, q1 + 9, k0 + 9, k1 + 9, lo, hi], N + 18, N + 18)[q0 + 9 : q1 + 9, k0 + 9 : k1 + 9]
        assert cells.size, row
        assert cells.any(axis=1).all(), f"an empty row in {row}"
        assert cells.any(axis=0).all(), f"an empty column in {row}"
        turns = [k - q for q, k in np.argwhere(cells) + np.array([q0, k0])]
        assert (lo, hi) == (min(turns), max(turns)), f"a loose diagonal in {row}"


@given(raw)
def test_tighten_keeps_exactly_the_visible_pairs(rows: list[tuple[int, ...]]) -> None:
    t, kept = tables.tighten_indexed(as_table(rows))
    assert_tight(t)
    for i, row in enumerate(rows):
        where = np.flatnonzero(kept == i)
        assert (dense_masks.bands(t[where].tolist(), N, N) == dense_masks.band(row, N, N)).all()


@given(raw)
def test_tighten_twice_is_tighten_once(rows: list[tuple[int, ...]]) -> None:
    once = tables.tighten(as_table(rows))
    assert (tables.tighten(once) == once).all()


@given(raw)
def test_area_counts_the_cells_of_each_band(rows: list[tuple[int, ...]]) -> None:
    t = tables.tighten(as_table(rows))
    shifted = t + np.array([2, 2, 2, 2, 0, 0])
    assert tables.area(t).tolist() == [dense_masks.band(row, N + 5, N + 5).sum() for row in shifted.tolist()]


@given(intervals, intervals)
def test_overlapping_finds_all_pairs_that_share_a_point(a: list[list[int]], b: list[list[int]]) -> None:
    (a0, a1), (b0, b1) = (np.array(x, dtype=np.int64).reshape(-1, 2).T for x in (a, b))
    i, j = tables.overlapping(a0, a1, b0, b1)
    # an empty interval shares no point; an intersection with one is empty, and tighten drops it
    solid = [(x, y) for x, y in zip(i.tolist(), j.tolist(), strict=True) if a0[x] < a1[x] and b0[y] < b1[y]]
    expected = [(x, y) for x in range(len(a)) for y in range(len(b)) if set(range(*a[x])) & set(range(*b[y]))]
    assert sorted(solid) == expected
    assert (np.diff(i) >= 0).all()


@given(intervals, intervals)
def test_many_overlapping_intervals_are_found_in_the_same_order(a: list[list[int]], b: list[list[int]]) -> None:
    (a0, a1), (b0, b1) = (np.array(x, dtype=np.int64).reshape(-1, 2).T for x in (a, b))
    few = tables.overlapping(a0, a1, b0, b1)
    with mock.patch.object(tables, "FEW_CANDIDATES", -1):
        many = tables.overlapping(a0, a1, b0, b1)
    assert [x.tolist() for x in many] == [x.tolist() for x in few]


def test_a_long_interval_does_not_slow_down_the_others() -> None:
    """The first interval reaches over all others: so many candidates, 1.25e9, would be 10 GB each for i and j."""
    a = np.arange(50_000)
    b0, b1 = np.append(0, a), np.append(50_000, a + 1)
    i, j = tables.overlapping(a, a + 1, b0, b1)
    assert (i == np.repeat(a, 2)).all()
    assert np.bincount(j).tolist() == [50_000, *[1] * 50_000]


@given(two_masks)
def test_many_bands_are_subtracted_in_rounds(two: tuple[Drawn, Drawn]) -> None:
    (a, in_a), (b, in_b) = two
    with mock.patch.object(tables, "FEW_BANDS", -1):
        left = tables.subtract(a.table, b.table)
    assert_tight(left)
    assert (dense_masks.times_covered(left.tolist(), N, N) == (in_a & ~in_b)).all()


@pytest.mark.parametrize("few", [0, 64], ids=["in rounds", "one by one"])
@given(rows=raw)
def test_a_union_is_disjoint(few: int, rows: list[tuple[int, ...]]) -> None:
    t = tables.tighten(as_table(rows))
    with mock.patch.object(tables, "FEW_BANDS_OF_USERS", few):
        disjoint = tables.union(t)
    assert (dense_masks.times_covered(disjoint.tolist(), N, N) == dense_masks.bands(t.tolist(), N, N)).all()


@pytest.mark.parametrize(
    ("limit", "message"),
    [("MAX_BAND_PAIRS", "overlap in 2,500 pairs; at most 100"), ("MAX_BANDS", "before bands are")],
)
def test_bands_that_are_too_many_to_subtract(limit: str, message: str) -> None:
    """Columns without the rows that cross them: 1,000 squares are left."""
    columns = Mask.from_bands([(0, 200, 4 * i, 4 * i + 2, -200, 200) for i in range(50)], 200)
    with (
        mock.patch.object(tables, "FEW_BANDS", 10),
        mock.patch.object(tables, limit, 100),
        pytest.raises(MaskError, match=message),
    ):
        tables.subtract(columns.table, columns.transposed.table)


def test_a_hundred_thousand_documents_are_combined() -> None:
    lengths = [3, 7] * 50_000
    mask, n = rs.documents(lengths), 500_000
    assert (~mask).area == n * n - mask.area
    assert ~~mask == mask
    assert (mask - rs.window(left=0)).area == mask.area - n
    assert (mask | rs.documents([n])).area == n * (n + 1) // 2
    assert len(Mask.from_bands(mask.table.tolist(), n)) == 100_000


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 4)), max_size=6))
def test_ranges_concatenates_ranges(given: list[tuple[int, int]]) -> None:
    first, count = np.array(given, dtype=np.int64).reshape(-1, 2).T
    assert tables.ranges(first, count).tolist() == [x for f, c in given for x in range(f, f + c)]


@given(two_masks)
def test_intersect_and_subtract(two: tuple[Drawn, Drawn]) -> None:
    a, b = two
    for t, expected in (
        (tables.intersect(a.mask.table, b.mask.table), a.truth & b.truth),
        (tables.subtract(a.mask.table, b.mask.table), a.truth & ~b.truth),
    ):
        assert_tight(t)
        assert (dense_masks.times_covered(t.tolist(), N, N) == expected).all()


# -- joining -----------------------------------------------------------------------------------------------------------


def chopped(t: Table, cuts: Sequence[int]) -> Table:
    """The bands of a table cut along a grid: the same cells in many more bands, most of which can be joined again."""
    grid = [(a, b, c, d, -99, 99) for a, b in pairwise(cuts) for c, d in pairwise(cuts)]
    return tables.intersect(t, as_table(grid))


grids = st.lists(st.integers(1, 23), max_size=4).map(lambda cuts: [0, *sorted(cuts), 24])


@given(masks(24), grids)
def test_coalesce_keeps_the_set_and_never_adds_bands(drawn: Drawn, cuts: list[int]) -> None:
    pieces = chopped(drawn.mask.table, cuts)
    t = tables.coalesce(pieces)
    assert len(t) <= len(pieces)
    assert (dense_masks.times_covered(t.tolist(), *drawn.truth.shape) == drawn.truth).all()
    assert len(tables.coalesce(t)) == len(t)


ROWS = (0, 3, 0, 9, -99, 99), (6, 9, 0, 9, -99, 99)

JOINED: dict[str, list[tuple[int, ...]]] = {
    "a causal square": [(0, 9, 0, 9, -99, 0)],
    "a window": [(0, 9, 0, 9, -2, 1)],
    "two wide bands": [*ROWS],
    "two tall bands": [(k0, k1, q0, q1, -hi, -lo) for q0, q1, k0, k1, lo, hi in ROWS],
    "two documents": [(0, 4, 0, 4, -99, 0), (4, 9, 4, 9, -99, 0)],
}


@pytest.mark.parametrize("bands", JOINED.values(), ids=JOINED)
def test_coalesce_restores_bands_cut_along_a_grid(bands: list[tuple[int, ...]]) -> None:
    whole = tables.tighten(as_table(bands))
    pieces = chopped(whole, [0, 1, 3, 4, 8, 9])
    assert len(pieces) > 2 * len(whole)
    for seed in range(20):
        shuffled = np.random.default_rng(seed).permutation(pieces)
        assert tables.coalesce(shuffled).tolist() == whole.tolist()


@given(masks(24), grids, st.data())
def test_coalesce_grouped_never_joins_across_groups(drawn: Drawn, cuts: list[int], data: st.DataObject) -> None:
    t, shape = chopped(drawn.mask.table, cuts), drawn.truth.shape
    group = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(t), max_size=len(t))), dtype=np.int64)
    joined, of = tables.coalesce_grouped(t, group)
    for g in range(3):
        before, after = t[group == g].tolist(), joined[of == g].tolist()
        assert len(after) <= len(before)
        assert (dense_masks.times_covered(after, *shape) == dense_masks.times_covered(before, *shape)).all()
    assert (np.lexsort((joined[:, K0], joined[:, Q0], of)) == np.arange(len(of))).all(), "ordered by group, rows, columns"


@given(raw)
def test_dense_is_the_union(rows: list[tuple[int, ...]]) -> None:
    mask = Mask.from_bands(rows, N)
    assert (tables.dense(mask.table, N, N) == dense_masks.bands(rows, N, N)).all()
