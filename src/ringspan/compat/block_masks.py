"""A BlockMask for one rank's queries over all keys, in the order in which the ranks hold them.

The blocks are looked up, not computed again: a block of the share is hidden where all blocks that it takes tokens from
are, full where they all are full, and asks cell by cell otherwise. No cell is looked at here, so it costs what blocks cost.

Legend: B batch, H heads, Q and K blocks of queries and keys of the whole, I and J those of the share.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ringspan.caching.registry import on_clear_caches
from ringspan.compat.balancers import Layouts
from ringspan.errors import InputError
from ringspan.masks.block_mask import FULL, HIDDEN, PARTIAL, kinds
from ringspan.masks.predicate import MaskMod

# What a share was cut from, by its mask_mod, which it keeps through BlockMask.to() and the like.
_wholes: WeakKeyDictionary[MaskMod, BlockMask] = WeakKeyDictionary()


def whole_of(block_mask: BlockMask) -> BlockMask:
    """The mask of the whole sequence that this is a share of; itself, where it is no share."""
    return _wholes.get(block_mask.mask_mod, block_mask)


_rows: WeakKeyDictionary[BlockMask, dict[int, BlockMask]] = WeakKeyDictionary()
on_clear_caches(_rows.clear)


def row_of(block_mask: BlockMask, row: int) -> BlockMask:
    """The mask of one row of the batch, as a batch of its own; the same object every time, so that it is planned once."""
    rows = _rows.setdefault(block_mask, {})
    if row not in rows:
        ask, own = block_mask.mask_mod, slice(row, row + 1) if block_mask.kv_num_blocks.shape[0] > 1 else slice(None)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return ask(b + row, h, q_idx, kv_idx)

        full_counts, full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        rows[row] = BlockMask.from_kv_blocks(
            block_mask.kv_num_blocks[own],
            block_mask.kv_indices[own],
            None if full_counts is None else full_counts[own],
            None if full is None else full[own],
            BLOCK_SIZE=block_mask.BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=block_mask.seq_lengths,
        )
    return rows[row]


def shard_block_mask(whole: BlockMask, layouts: Layouts, rank: int) -> BlockMask:
    """This rank's queries over all keys, rank after rank."""
    q_len, kv_len = whole.seq_lengths
    kinds_BHQK = kinds(whole)
    rows = kinds_BHQK.shape[0]
    if q_len != kv_len:
        raise InputError(f"a BlockMask of {q_len} queries and {kv_len} keys is not of one sequence: only such can be sharded")
    if 1 not in (len(layouts), rows) and len(layouts) != rows:
        raise InputError(f"the balancer has {len(layouts)} rows and the BlockMask {rows}: they must be of one batch")
    q_block, kv_block = whole.BLOCK_SIZE
    q_tokens = [_in_blocks(layout.positions(rank), q_block) for layout in layouts]
    k_tokens = [_in_blocks(layout.order(), kv_block) for layout in layouts]
    takes_IQ = [_takes(tokens, q_block, kinds_BHQK.shape[2]).to(kinds_BHQK.device) for tokens in q_tokens]
    takes_JK = [_takes(tokens, kv_block, kinds_BHQK.shape[3]).to(kinds_BHQK.device) for tokens in k_tokens]
    kinds_BHIJ = torch.cat(
        [
            _of_share(kinds_BHQK[b % rows : b % rows + 1], takes_IQ[b % len(layouts)], takes_JK[b % len(layouts)])
            for b in range(max(rows, len(layouts)))
        ]
    )
    flat = [torch.from_numpy(np.stack([t.ravel() for t in tokens])).to(kinds_BHQK.device) for tokens in (q_tokens, k_tokens)]
    mask_mod = _settled(whole, kinds_BHQK, *flat)
    _wholes[mask_mod] = whole
    return BlockMask.from_kv_blocks(
        *_listed(kinds_BHIJ == PARTIAL),
        *_listed(kinds_BHIJ == FULL),
        BLOCK_SIZE=whole.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=(layouts[0].counts[rank], kv_len),
    )


def _in_blocks(tokens: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Tokens in rows of one block each; the last is filled up with its own last token, which no kernel will ask about."""
    padding = (0, -len(tokens) % size)
    return np.pad(tokens, padding, mode="edge").reshape(-1, size) if len(tokens) else np.zeros((0, size), dtype=np.int64)


def _takes(tokens_by_block: NDArray[np.int64], size: int, blocks: int) -> Tensor:
    """1.0 where a block of the share has a token of a block of the whole."""
    takes = torch.zeros(len(tokens_by_block), blocks)
    return takes.scatter_(1, torch.from_numpy(tokens_by_block // size), 1.0)


def _of_share(kinds_BHQK: Tensor, takes_IQ: Tensor, takes_JK: Tensor) -> Tensor:
    seen_BHIJ = takes_IQ @ (kinds_BHQK != HIDDEN).float() @ takes_JK.T > 0
    lacks_BHIJ = takes_IQ @ (kinds_BHQK != FULL).float() @ takes_JK.T > 0
    return torch.where(lacks_BHIJ, torch.where(seen_BHIJ, PARTIAL, HIDDEN), FULL)


def _listed(there_BHIJ: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row, and which come first."""
    order = there_BHIJ.int().argsort(dim=-1, descending=True, stable=True)
    return there_BHIJ.sum(dim=-1).int(), order.int()


def _settled(whole: BlockMask, kinds_BHQK: Tensor, q_tokens: Tensor, k_tokens: Tensor) -> MaskMod:
    """The mask_mod of a share: looks up which tokens are meant, and asks about those."""
    ask, (q_block, kv_block) = whole.mask_mod, whole.BLOCK_SIZE
    by_row, rows, heads = int(len(q_tokens) > 1), int(kinds_BHQK.shape[0] > 1), int(kinds_BHQK.shape[1] > 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q, k = q_tokens[b * by_row, q_idx], k_tokens[b * by_row, kv_idx]
        kind = kinds_BHQK[b * rows, h * heads, q // q_block, k // kv_block]
        return (kind == FULL) | ((kind == PARTIAL) & ask(b, h, q, k))

    return mask_mod
