"""Where a sequence splits into independent documents, against the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.masks.cuts import is_crossed

N = 12
BAND = st.tuples(*[st.integers(0, N)] * 4, st.integers(-3, 3), st.integers(0, 3)).map(lambda b: (*b[:5], b[4] + b[5]))
DIAGONAL = st.tuples(st.integers(0, N), st.integers(0, N)).map(lambda b: (*b, *b, 0, 0))


@given(st.lists(BAND | DIAGONAL, max_size=4))
def test_cuts_are_those_of_the_dense_mask(bands: list[tuple[int, int, int, int, int, int]]) -> None:
    mask = rs.Mask.from_bands(bands, N)
    dense, places = mask.dense(), np.arange(N + 1)
    crossed = [bool(dense[:c, c:].any() or dense[c:, :c].any()) for c in places]
    assert is_crossed(mask.table, places).tolist() == crossed
    used = dense.any(axis=0) | dense.any(axis=1)
    between = [c for c in range(1, N) if not crossed[c] and (used[c - 1] or used[c])]
    assert mask.documents(single=True).tolist() == [0, *between, N]
    assert set(mask.documents().tolist()) <= {0, *between, N}


IDS = torch.repeat_interleave(torch.arange(6), torch.tensor([60, 1, 1, 1, 1, 64]))


@pytest.mark.parametrize(
    ("mask", "bounds"),
    [
        (rs.mask_mod(lambda b, h, q, k: (IDS[q] == IDS[k]) & (k <= q), 128), [0, 60, 61, 62, 63, 64, 128]),
        (rs.fold([[1], [2], [3, 4]]).mask(), [0, 1, 2, 4]),
        (rs.documents([3, 1, 1]) | rs.window(0, 0), [0, 3, 4, 5]),
        (rs.documents([[3, 1, 1], [5]]), [0, 3, 4, 5, 10]),
        (rs.causal(3), [0, 3]),
        (rs.full(0), [0]),
    ],
)
def test_documents_of_one_token_in_one_band(mask: rs.Mask, bounds: list[int]) -> None:
    assert mask.documents(single=True).tolist() == bounds


def test_a_million_tokens_of_their_own() -> None:
    """Layouts see one document, so that they need not separate a million."""
    mask = rs.full(2**20) & rs.window(0, 0)
    assert len(mask.documents(single=True)) == 2**20 + 1
    assert mask.documents().tolist() == [0, 2**20]
