"""Calls of PyTorch's fused attention: together they compute every pair of the bands once, whatever the limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringspan.kernels import sdpa_calls
from ringspan.kernels.containment import is_one_part
from ringspan.kernels.sdpa_calls import RectangleCall, make_sdpa_calls
from ringspan.masks import Band
from tests import dense_masks
from tests.hypothesis_strategies import Drawn, masks


@pytest.fixture(autouse=True)
def clear_cache() -> Iterator[None]:
    """Discard cached calls, which were made with other limits."""
    make_sdpa_calls.cache_clear()
    yield
    make_sdpa_calls.cache_clear()


def with_settings(bands: Sequence[Band], waste: int, block: int) -> tuple[RectangleCall, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa_calls, "WASTE", waste)
        patch.setattr(sdpa_calls, "BLOCK", block)
        make_sdpa_calls.cache_clear()
        return make_sdpa_calls(tuple(bands))


def covered(given: Sequence[RectangleCall], rows: int, cols: int) -> NDArray[np.int64]:
    """Return how often each pair is computed: all of a rectangle, its lower triangle, or its bands."""
    count = np.zeros((rows, cols), dtype=np.int64)
    for call in given:
        q0, q1, k0, k1 = call[:4]
        assert 0 <= q0 < q1 <= rows
        assert 0 <= k0 < k1 <= cols
        inside = np.zeros_like(count)
        if call.bands:
            assert not call.is_causal
            inside = dense_masks.times_covered(call.bands, rows, cols)
        else:
            i, j = np.mgrid[0 : q1 - q0, 0 : k1 - k0]
            inside[q0:q1, k0:k1] = (j <= i) | (not call.is_causal)
        outside = inside.copy()
        outside[q0:q1, k0:k1] = 0
        assert not outside.any()
        count += inside
    return count


@given(drawn=masks(max_len=20), waste=st.sampled_from([0, 3, 20, 10**6]), block=st.sampled_from([1, 2, 5, 64]))
def test_calls_compute_every_pair_once(drawn: Drawn, waste: int, block: int) -> None:
    given = with_settings(drawn.mask.bands, waste, block)
    assert np.array_equal(covered(given, *drawn.mask.lengths), drawn.truth)


@given(drawn=masks(max_len=20), waste=st.sampled_from([0, 5, 50]))
def test_hidden_pairs_are_limited(drawn: Drawn, waste: int) -> None:
    """This holds for calls of several bands, and of one band that is no window.

    A window has hidden triangles at its ends.
    """
    for call in with_settings(drawn.mask.bands, waste, 4):
        area = sum(band.area for band in call.bands)
        if len(call.bands) > 1 or (call.bands and call.bands[0] in drawn.mask.bands and not call.bands[0].cut_below):
            assert (call.q1 - call.q0) * (call.k1 - call.k0) <= area + waste


LARGE = 10_000  # so large that no rectangle is below WASTE

BRANCHES = {
    "full": ([Band(0, LARGE, 0, LARGE, 1 - LARGE, LARGE - 1)], [RectangleCall(0, LARGE, 0, LARGE)]),
    "causal": ([Band(0, LARGE, 0, LARGE, 1 - LARGE, 0)], [RectangleCall(0, LARGE, 0, LARGE, is_causal=True)]),
    "causal, more rows than keys": ([Band(5, LARGE, 5, 999, 6 - LARGE, 0)], [RectangleCall(5, LARGE, 5, 999, is_causal=True)]),
    "causal, after keys that all see": (
        [Band(0, LARGE, 0, LARGE + 50, 1 - LARGE, 50)],
        [RectangleCall(0, LARGE, 0, 50), RectangleCall(0, LARGE, 50, LARGE + 50, is_causal=True)],
    ),
    "a small step": (
        [Band(0, 4, 0, 6, -3, 2)],
        [RectangleCall(0, 4, 0, 6, bands=(Band(0, 4, 0, 6, -3, 2),))],
    ),
    "small neighbours": (
        [Band(0, 9, 0, 9, -8, 0), Band(9, 20, 9, 20, -10, 0)],
        [RectangleCall(0, 20, 0, 20, bands=(Band(0, 9, 0, 9, -8, 0), Band(9, 20, 9, 20, -10, 0)), has_other_parts=True)],
    ),
    "large neighbours": (
        [Band(0, 900, 0, 900, -899, 0), Band(900, 1800, 900, 1800, -899, 0)],
        [RectangleCall(0, 900, 0, 900, is_causal=True), RectangleCall(900, 1800, 900, 1800, is_causal=True)],
    ),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_calls_of_each_kind_of_band(name: str) -> None:
    bands, expected = BRANCHES[name]
    assert list(make_sdpa_calls(tuple(bands))) == expected


@pytest.mark.parametrize(("left", "rows"), [(10, 64), (99, 100), (5000, 512)])
def test_a_window_is_computed_by_blocks_of_rows(left: int, rows: int) -> None:
    """A block has as many rows as the window has keys, between 64 and 512, and the keys that any of its rows sees."""
    given = make_sdpa_calls((Band(0, LARGE, 0, LARGE, -left, 0),))
    assert len(given) == -(-LARGE // rows)
    assert {call.q1 - call.q0 for call in given[:-1]} == {rows}
    assert all(call.k1 - call.k0 <= rows + left for call in given)
    wasted = sum((x.q1 - x.q0) * (x.k1 - x.k0) for x in given) - Band(0, LARGE, 0, LARGE, -left, 0).area
    assert wasted <= LARGE * rows


def test_the_order_of_bands_does_not_matter() -> None:
    bands = [Band(i * 900, i * 900 + 900, 0, 900, -9999, 9999) for i in range(4)]
    assert make_sdpa_calls(tuple(bands)) == make_sdpa_calls(tuple(bands[::-1]))


@given(drawn=masks(max_len=20), waste=st.sampled_from([3, 10**6]))
def test_calls_that_must_not_join_parts(drawn: Drawn, waste: int) -> None:
    """Only a diagonal, whose every pair is a part, is still one call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa_calls, "WASTE", waste)
        make_sdpa_calls.cache_clear()
        given = make_sdpa_calls(drawn.mask.bands, join_parts=False)
    assert np.array_equal(covered(given, *drawn.mask.lengths), drawn.truth)
    assert all(
        is_one_part(call.bands) or [band.lo for band in call.bands] == [band.hi for band in call.bands] for call in given
    )
