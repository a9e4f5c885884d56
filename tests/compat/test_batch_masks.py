"""When the rows of a batch are planned as one mask of bands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import ringspan as rs
from ringspan.compat.attention_calls import FlexCall, SdpaCall
from ringspan.compat.batch_masks import masks_of_rows
from ringspan.layouts import contiguous, zigzag

N, BLOCK = 96, 16
LAYOUTS = [(layout, layout) for layout in (zigzag(rs.causal(N), 2), contiguous(rs.causal(N), 2))]
X = torch.zeros(2, 1, N, 8)


def ids_of(*lengths: list[int]) -> Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])


def same_document(ids: Tensor) -> BlockMask:
    return create_block_mask(
        lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q), len(ids), None, N, N, device="cpu", BLOCK_SIZE=BLOCK
    )


def test_rows_that_differ_are_bands() -> None:
    mask = same_document(ids_of([40, 56], [96]))
    want = (rs.documents([40, 56]), rs.causal(N))
    for pairs in (LAYOUTS, LAYOUTS[:1]):
        call = FlexCall(X, X, X, block_mask=mask)
        for _ in range(2):  # the second time from the cache
            assert masks_of_rows(call, pairs) == want


def test_a_tensor_that_changes_is_read_again() -> None:
    """A document ends 4 tokens earlier, in the same block."""
    ids = ids_of([40, 56], [96])
    call = FlexCall(X, X, X, block_mask=same_document(ids))
    assert masks_of_rows(call, LAYOUTS[:1]) == (rs.documents([40, 56]), rs.causal(N))
    ids[0, 36:40] = 1
    assert masks_of_rows(call, LAYOUTS[:1]) == (rs.documents([36, 60]), rs.causal(N))


def test_calls_without_a_mask_are_rows_only_if_layouts_differ() -> None:
    assert masks_of_rows(SdpaCall(X, X, X, is_causal=True), LAYOUTS) == (rs.causal(N),) * 2
    assert masks_of_rows(FlexCall(X, X, X), LAYOUTS) == (rs.full(N),) * 2
    assert masks_of_rows(SdpaCall(X, X, X, is_causal=True), LAYOUTS[:1]) is None


def bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + b


def test_other_calls_are_planned_as_before() -> None:
    alike, several = same_document(ids_of([40, 56], [40, 56])), same_document(ids_of([40, 56], [96]))
    assert masks_of_rows(FlexCall(X, X, X, block_mask=alike), LAYOUTS[:1]) is None
    assert masks_of_rows(FlexCall(X, X, X, block_mask=alike), LAYOUTS) == (rs.documents([40, 56]),) * 2
    assert masks_of_rows(FlexCall(X, X, X, bias, several), LAYOUTS) is None
    assert masks_of_rows(FlexCall(X[:1], X[:1], X[:1], block_mask=alike), LAYOUTS[:1]) is None
    ragged = create_block_mask(lambda b, h, q, k: (3 * q + k * k + b) % 7 < 4, 2, None, N, N, device="cpu", BLOCK_SIZE=BLOCK)
    for _ in range(2):
        assert masks_of_rows(FlexCall(X, X, X, block_mask=ragged), LAYOUTS) is None
        assert masks_of_rows(FlexCall(X, X, X, block_mask=ragged), LAYOUTS[:1]) is None
