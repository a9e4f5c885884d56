"""Block tables: all pairs of a full block are visible, some of a partial one, none of a block that is not listed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringspan.kernels.blocks import MIN_LENGTH, BlockTable, block_tables
from ringspan.kernels.intervals import interval_layers
from tests.hypothesis_strategies import Drawn, masks
from tests.kernels.test_intervals import dense


def listed(lists: BlockTable, rows: int, cols: int) -> NDArray[np.int64]:
    """Return how often each block is listed."""
    assert len(lists.counts) == len(lists.indices) == max(rows, MIN_LENGTH)
    assert lists.indices.shape[1] >= MIN_LENGTH
    assert (lists.counts[rows:] == 0).all()
    out = np.zeros((rows, cols), dtype=np.int64)
    for row, (count, index) in enumerate(zip(lists.counts[:rows], lists.indices[:rows], strict=True)):
        assert (np.diff(index[:count]) > 0).all()
        out[row, index[:count]] += 1
    return out


@given(drawn=masks(), size=st.sampled_from([1, 2, 3, 5, 8, 32]))
def test_blocks_agree_with_the_dense_mask(drawn: Drawn, size: int) -> None:
    for layer in interval_layers(drawn.mask.bands):
        found = block_tables(layer.start, layer.stop, layer.k1 - layer.k0, size=size)
        seen = dense(layer, *drawn.truth.shape)[layer.q0 : layer.q1, layer.k0 : layer.k1]
        over = [(0, -n % size) for n in seen.shape]  # pairs beyond the sequence are not visible
        rows, cols = (-(-n // size) for n in seen.shape)
        tiles = np.pad(seen, over).reshape(rows, size, cols, size)
        full, some = tiles.all((1, 3)), tiles.any((1, 3))
        assert np.array_equal(listed(found.full, rows, cols), full)
        assert np.array_equal(listed(found.partial, rows, cols), some & ~full)
        assert np.array_equal(listed(found.full_by_key, cols, rows), full.T)
        assert np.array_equal(listed(found.partial_by_key, cols, rows), (some & ~full).T)


def test_blocks_between_distant_intervals_are_not_listed() -> None:
    start, stop = np.array([0, 1000]), np.array([10, 1010])
    found = block_tables(start, stop, 1010)
    assert found.partial.counts[0] == 2
    assert found.partial.indices[0, :2].tolist() == [0, 7]
