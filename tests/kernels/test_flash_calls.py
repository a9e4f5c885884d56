"""Calls of flash attention: by its definitions of windows and sequences they compute each pair of the bands once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given

from ringspan.kernels.flash_calls import FlashCall, Window, group_bands, make_flash_calls, window_of_band
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


def test_documents_on_one_rank_are_one_call() -> None:
    """Thirty triangles are one call, and thirty rectangles of the same queries are a second one."""
    triangles = [Band(8 * n, 8 * n + 8, 8 * n, 8 * n + 8, -7, 0) for n in range(30)]
    rectangles = [Band(8 * n, 8 * n + 8, 300 + 5 * n, 305 + 5 * n, 293 - 3 * n, 304 - 3 * n) for n in range(30)]
    assert [len(group) for group in group_bands(triangles + rectangles)] == [30, 30]


def test_bands_that_share_keys_are_separate_calls() -> None:
    first, second = Band(0, 4, 0, 10, -3, 9), Band(4, 8, 0, 20, -7, 15)
    assert [len(group) for group in group_bands([first, second])] == [1, 1]
