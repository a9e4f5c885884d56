"""The formulas of a band, compared with counting its cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.masks import MAX_LENGTH, Band
from ringspan.masks import table as tables
from tests import dense_masks

N = 9

edges = st.tuples(st.integers(0, N), st.integers(0, N)).map(sorted)
diagonals = st.tuples(st.integers(-N - 3, N + 3), st.integers(-N - 3, N + 3)).map(sorted)
loose = st.builds(lambda q, k, d: Band(*q, *k, *d), edges, edges, diagonals)


@given(loose)
def test_area_counts_the_cells_of_any_band(band: Band) -> None:
    assert band.area == dense_masks.band(band, N, N).sum()


@given(loose)
def test_a_tight_band_knows_which_diagonals_cut_it(band: Band) -> None:
    for tight in map(Band._make, tables.table(band).tolist()):
        inside = dense_masks.band(tight, N, N)[tight.q0 : tight.q1, tight.k0 : tight.k1]
        assert (tight.rows, tight.cols) == inside.shape
        assert tight.is_full == inside.all()
        assert tight.cut_below == (not inside[-1, 0])
        assert tight.cut_above == (not inside[0, -1])


@given(loose, st.integers(0, 3), st.integers(0, 3))
def test_shifting_moves_every_cell(band: Band, dq: int, dk: int) -> None:
    moved = dense_masks.band(band.shifted(dq, dk), N + 3, N + 3)
    assert (moved[dq : dq + N, dk : dk + N] == dense_masks.band(band, N, N)).all()
    assert moved.sum() == band.area


@pytest.mark.parametrize(
    ("band", "area"),
    [
        (Band(0, MAX_LENGTH, 0, MAX_LENGTH, -MAX_LENGTH, MAX_LENGTH), MAX_LENGTH**2),
        (Band(0, MAX_LENGTH, 0, MAX_LENGTH, -MAX_LENGTH, 0), MAX_LENGTH * (MAX_LENGTH + 1) // 2),
        (Band(0, MAX_LENGTH, 0, MAX_LENGTH, 0, 0), MAX_LENGTH),
        (Band(0, 10**6, 0, 10**6, -4095, 0), 10**6 * 4096 - 4096 * 4095 // 2),
        (Band(0, 1, 0, MAX_LENGTH, 5, 7), 3),
    ],
)
def test_area_of_bands_too_long_to_count(band: Band, area: int) -> None:
    assert band.area == area
    assert tables.area(tables.table(band)).tolist() == [area]
