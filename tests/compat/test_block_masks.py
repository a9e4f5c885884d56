"""Shards of a BlockMask have the cells of the whole mask, in the token order of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import ringspan as rs
from ringspan.compat import _HeadTailLoadBalancer, _PerDocumentHeadTailLoadBalancer, _PTRRLoadBalancer
from ringspan.compat.balancers import Layouts, layouts_of
from ringspan.compat.block_masks import shard_block_mask, unsharded
from tests.compat.test_balancers import documents_mask

DOCUMENTS = [[200, 131], [1, 330]]
N = 331


def cells(mask: BlockMask, rows: int, heads: int) -> torch.Tensor:
    """The cells that a kernel computes: all cells of full blocks, and those of partial blocks that mask_mod allows."""
    (q_len, kv_len), (q_block, kv_block) = mask.seq_lengths, mask.BLOCK_SIZE
    index = [torch.arange(n) for n in (rows, heads, q_len, kv_len)]
    mask_mod = mask.mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mask_mod = torch.vmap(mask_mod, in_dims=dims)
    allowed = mask_mod(*index)
    visible = torch.zeros(rows, heads, q_len, kv_len, dtype=torch.bool)
    full = (mask.full_kv_num_blocks, mask.full_kv_indices, torch.ones_like(allowed))
    for counts, indices, value in ((mask.kv_num_blocks, mask.kv_indices, allowed), full):
        if counts is None or indices is None:
            continue
        for b in range(rows):
            for h in range(heads):
                for i in range(counts.shape[2]):
                    bb, hh = b % counts.shape[0], h % counts.shape[1]
                    for j in indices[bb, hh, i, : counts[bb, hh, i]].tolist():
                        block = (slice(i * q_block, (i + 1) * q_block), slice(j * kv_block, (j + 1) * kv_block))
                        visible[b, h][block] = value[b, h][block]
    return visible


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k < 40 * (h + 1)) & (q >= k)


def from_blocks() -> BlockMask:
    """A mask that is given by its blocks alone: its mask_mod allows everything."""
    there = torch.rand(2, 1, 21, 21, generator=torch.Generator().manual_seed(0)) < 0.3
    order = there.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(there.sum(-1).int(), order, BLOCK_SIZE=16, seq_lengths=(N, N))


MASKS: dict[str, Callable[[], BlockMask]] = {
    "documents per row": lambda: documents_mask(DOCUMENTS, block=16),
    "one for all rows": lambda: create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=32),
    "by head": lambda: create_block_mask(by_head, None, 3, N, N, device="cpu", BLOCK_SIZE=(16, 32)),
    "from blocks": from_blocks,
}

LAYOUTS: dict[str, Callable[[BlockMask, int], Layouts]] = {
    "contiguous": lambda mask, world: layouts_of(None, N, world),
    "head-tail": lambda mask, world: _HeadTailLoadBalancer(N, world, "cpu").layouts,
    "per document and row": lambda mask, world: _PerDocumentHeadTailLoadBalancer(DOCUMENTS, world, "cpu").layouts,
    "round robin": lambda mask, world: _PTRRLoadBalancer(mask, world).layouts[:1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_shards_have_the_cells_of_the_whole(mask: str, layout: str) -> None:
    whole, world = MASKS[mask](), 2
    layouts = LAYOUTS[layout](whole, world)
    expected = cells(whole, 2, 3)
    for rank in range(world):
        shard = shard_block_mask(whole, layouts, rank)
        actual = cells(shard, 2, 3)
        for b in range(2):
            at = layouts[b % len(layouts)]
            assert torch.equal(actual[b], expected[b][:, at.positions(rank)][:, :, at.order()])
        assert unsharded(shard) is whole
        assert unsharded(shard.to("cpu")) is whole
    assert unsharded(whole) is whole


def test_layouts_of_whole_blocks_add_no_partial_blocks() -> None:
    """If the chunks of a layout are whole blocks, hidden and full blocks stay so."""
    whole = create_block_mask(causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=16)
    layouts = _HeadTailLoadBalancer(256, 4, "cpu").layouts
    shards = [shard_block_mask(whole, layouts, rank) for rank in range(4)]
    assert whole.full_kv_num_blocks is not None
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert sum(int(getattr(shard, name).sum()) for shard in shards) == int(getattr(whole, name).sum())


def test_queries_and_keys_of_different_lengths() -> None:
    whole = create_block_mask(lambda b, h, q, k: 2 * q >= k, None, None, 32, 70, device="cpu", BLOCK_SIZE=16)
    layouts, kv_layouts = layouts_of(None, 32, 2), layouts_of(None, 70, 2)
    for rank in range(2):
        shard = shard_block_mask(whole, layouts, rank, kv_layouts)
        assert torch.equal(cells(shard, 1, 1)[0, 0], cells(whole, 1, 1)[0, 0][16 * rank : 16 * rank + 16])


def test_a_rank_without_tokens() -> None:
    shard = shard_block_mask(documents_mask([[3]], block=16), layouts_of(None, 3, 4), 0)
    assert shard.seq_lengths == (0, 3)


def test_masks_that_cannot_be_sharded_are_refused() -> None:
    rows = _PerDocumentHeadTailLoadBalancer([[N], [N], [N]], 2, "cpu").layouts
    with pytest.raises(rs.InputError, match="3 rows and the BlockMask 2"):
        shard_block_mask(documents_mask(DOCUMENTS, block=16), rows, 0)
