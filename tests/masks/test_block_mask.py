"""block_mask: a BlockMask means what its blocks and its mask_mod say, whatever way it was made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import ringspan as rs
from tests import truth

N, M = 300, 200


def ragged(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q * 3 + k * k) % 11 < 4


@pytest.mark.parametrize("size", [128, 16, (32, 64)])
def test_blocks_of_any_size(size: Any) -> None:
    q, k = np.ogrid[:N, :M]
    mask = rs.block_mask(create_block_mask(ragged, None, None, N, M, device="cpu", BLOCK_SIZE=size))
    assert mask.lengths == (N, M)
    assert mask.predicate is not None
    assert (mask.dense() == ((q * 3 + k * k) % 11 < 4)).all()


def test_documents_become_bands() -> None:
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 50, 7, 143]))
    made = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, N, N, device="cpu")
    assert rs.block_mask(made) == rs.documents([100, 50, 7, 143])
    assert rs.block_mask(made).predicate is None


@pytest.mark.parametrize(("batch", "heads"), [(2, None), (None, 3), (2, 3), (1, None)])
def test_per_batch_and_per_head(batch: int | None, heads: int | None) -> None:
    shift = torch.tensor([[0, 40, 80], [120, 160, 200]])

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        at = shift[b if batch else 0, h if heads else 0]
        return (q >= at) & (k <= q)

    mask = rs.block_mask(create_block_mask(sees, batch, heads, N, N, device="cpu", BLOCK_SIZE=32))
    for b in range(batch or 1):
        for h in range(heads or 1):
            want = truth.causal(N, N) & (np.arange(N) >= shift[b, h].item())[:, None]
            assert (mask.dense(b=b, h=h) == want).all()
    if (batch or 1) * (heads or 1) > 1:
        assert mask.predicate is not None
        assert (mask.predicate.batch, mask.predicate.heads) == (batch, heads)
        assert not truth.bands(mask.bands, N, N)[: shift.min() // 32 * 32].any(), "rows that nobody sees from are not planned"


def lists(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of one head, (1, 1, rows) and (1, 1, rows, 3); what is behind the count is garbage."""
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    indices = torch.tensor([row + [2] * (3 - len(row)) for row in rows], dtype=torch.int32)
    return counts[None, None], indices[None, None]


def test_from_kv_blocks_keeps_hidden_partial_and_full() -> None:
    partial, full = lists([0], [], [1, 0]), lists([], [1], [2])
    made = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=(4, 4), mask_mod=lambda b, h, q, k: k < q, seq_lengths=(10, 12))
    want = np.zeros((10, 12), dtype=bool)
    q, k = np.ogrid[:10, :12]
    want[:4, :4], want[4:8, 4:8], want[8:, 8:] = (k < q)[:4, :4], True, True
    want[8:, :8] = True
    assert (rs.block_mask(made).dense() == want).all()


def test_from_kv_blocks_without_a_function() -> None:
    made = BlockMask.from_kv_blocks(*lists([0], [0, 1], [2]), BLOCK_SIZE=(4, 4), seq_lengths=(12, 12))
    want = np.kron([[1, 0, 0], [1, 1, 0], [0, 0, 1]], np.ones((4, 4))).astype(bool)
    assert (rs.block_mask(made).dense() == want).all()


def test_anything_else_is_refused() -> None:
    with pytest.raises(rs.MaskError, match="expected a BlockMask of FlexAttention, got Tensor"):
        rs.block_mask(torch.ones(3, 3))  # type: ignore[arg-type]
