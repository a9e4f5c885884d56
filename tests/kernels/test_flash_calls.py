"""Calls of flash attention: by its definitions of windows and sequences they compute each pair of the bands once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given

from ringspan.kernels import flash_calls
from ringspan.kernels.flash_calls import FlashCall, Window, group_bands, make_flash_calls, query_ranges, window_of_band
from ringspan.masks import Band
from ringspan.masks import table as tables
from tests.hypothesis_strategies import Drawn, masks

CPU = torch.device("cpu")


def seen_through(shape: Window, rows: int, cols: int) -> np.ndarray:
    """Return which pairs of ``rows × cols`` are inside a window, by the documentation of flash-attention."""
    distance = np.arange(cols)[None, :] - np.arange(rows)[:, None] - (cols - rows)
    left = np.inf if shape.left is None else shape.left
    right = np.inf if shape.right is None else shape.right
    return (-left <= distance) & (distance <= right)


def as_flash_2(shape: Window, longest: int) -> Window:
    """Change a window as FlashAttention-2 does in mha_varlen_fwd and set_params_fprop.

    ``longest``: sequence of keys.
    """
    left, right = (None if side is None or side >= longest else side for side in shape)
    if left is None and right is None:
        return Window(None, None)
    return Window(longest if left is None else left, longest if right is None else right)


def sequences(call: FlashCall) -> list[tuple[slice, slice]]:
    """Return the queries and keys of each sequence of a call, counted from the first of the call."""
    if call.q_sequences is None or call.k_sequences is None:
        return [(slice(0, call.queries.stop - call.queries.start), slice(0, call.keys.stop - call.keys.start))]
    q, k = call.q_sequences.cu_seqlens.tolist(), call.k_sequences.cu_seqlens.tolist()
    assert (q[0], q[-1], k[0], k[-1]) == (0, call.queries.stop - call.queries.start, 0, call.keys.stop - call.keys.start)
    assert (call.q_sequences.max_seqlen, call.k_sequences.max_seqlen) == (max(np.diff(q)), max(np.diff(k)))
    return [(slice(*x), slice(*y)) for x, y in zip(pairwise(q), pairwise(k), strict=True)]


@given(masks())
def test_every_tight_band_is_one_window(drawn: Drawn) -> None:
    for band in drawn.mask:
        shape = window_of_band(band)
        local = band.shifted(-band.q0, -band.k0)
        assert np.array_equal(
            seen_through(shape, band.rows, band.cols), tables.dense(tables.table(local), band.rows, band.cols)
        )
        assert all(side is None or side >= 0 for side in shape)
        assert shape.is_causal == (not band.cut_below and band.cut_above and band.hi == band.k1 - band.q1)


@given(masks())
def test_the_calls_of_a_mask_compute_every_pair_once(drawn: Drawn) -> None:
    times = np.zeros(drawn.mask.lengths, dtype=int)
    for call in make_flash_calls(tuple(drawn.mask), CPU):
        longest = max(k.stop - k.start for _, k in sequences(call))
        for q, k in sequences(call):
            shown = seen_through(call.window, q.stop - q.start, k.stop - k.start)
            assert np.array_equal(shown, seen_through(as_flash_2(call.window, longest), *shown.shape))
            times[call.queries, call.keys][q, k] += shown
    assert np.array_equal(times, drawn.truth.astype(int))


def test_gaps_are_separate_sequences() -> None:
    (call,) = make_flash_calls((Band(0, 2, 0, 2, -1, 0), Band(3, 5, 4, 6, 0, 1)), CPU)
    assert call.q_sequences is not None
    assert call.k_sequences is not None
    assert call.q_sequences.cu_seqlens.tolist() == [0, 2, 3, 3, 5]
    assert call.k_sequences.cu_seqlens.tolist() == [0, 2, 2, 4, 6]


def test_results_of_large_gaps_are_left_out() -> None:
    """Documents of which other ranks have the beginning, at both ends of a rank and in its middle."""
    bands = [
        Band(q0, q1, k0, k1, k0 - q1 + 1, k1 - q0 - 1)
        for q0, q1, k0, k1 in ((0, 5, 0, 3), (1200, 1300, 3, 9), (9000, 9001, 9, 10))
    ]
    (call,) = make_flash_calls(tuple(bands), CPU)
    assert call.queries == slice(0, 9001)
    assert call.query_parts == (slice(0, 5), slice(1200, 1300), slice(9000, 9001))
    assert sum(stop - start for start, stop in query_ranges(bands)) == 106


def test_a_gap_that_another_call_computes_is_not_left_out() -> None:
    """Accumulators keep a result of all rows as it is, so it must not be in parts."""
    triangles = [Band(0, 100, 0, 100, -99, 0), Band(5000, 5100, 5000, 5100, -99, 0)]
    rectangle = Band(100, 5000, 100, 5000, -4899, 4899)
    assert [call.query_parts for call in make_flash_calls((*triangles, rectangle), CPU)] == [
        (slice(0, 5100),),
        (slice(100, 5000),),
    ]


@given(masks())
def test_parts_contain_every_query_that_sees_a_key(drawn: Drawn) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_calls, "MIN_GAP", 1)
        flash_calls.make_flash_calls.cache_clear()  # type: ignore[attr-defined]
        calls = make_flash_calls(tuple(drawn.mask), CPU)
        flash_calls.make_flash_calls.cache_clear()  # type: ignore[attr-defined]
    rows = np.zeros(drawn.mask.lengths[0], dtype=bool)
    for call in calls:
        times = np.zeros(drawn.mask.lengths[0], dtype=int)
        for part in call.query_parts:
            assert call.queries.start <= part.start < part.stop <= call.queries.stop
            times[part] += 1
        assert times.max(initial=0) <= 1
        rows |= times > 0
        for q, k in sequences(call):
            if k.start < k.stop:
                assert times[call.queries][q].all()
    assert np.array_equal(rows, drawn.truth.any(1))


def test_documents_on_one_rank_are_one_call() -> None:
    """Thirty triangles are one call, and thirty rectangles of the same queries are a second one."""
    triangles = [Band(8 * n, 8 * n + 8, 8 * n, 8 * n + 8, -7, 0) for n in range(30)]
    rectangles = [Band(8 * n, 8 * n + 8, 300 + 5 * n, 305 + 5 * n, 293 - 3 * n, 304 - 3 * n) for n in range(30)]
    assert [len(group) for group in group_bands(triangles + rectangles)] == [30, 30]


def test_bands_that_share_keys_are_separate_calls() -> None:
    first, second = Band(0, 4, 0, 10, -3, 9), Band(4, 8, 0, 20, -7, 15)
    assert [len(group) for group in group_bands([first, second])] == [1, 1]
