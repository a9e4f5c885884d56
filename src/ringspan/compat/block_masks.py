"""Shard a BlockMask: the mask of one rank's queries over all keys, in rank order.

The blocks of the shard follow from the blocks of the whole mask. A block of the shard takes tokens from several blocks
of the whole. It is hidden if all of those are hidden, full if all are full, and partial otherwise. The mask_mod is not
evaluated, so the cost depends on the number of blocks and not on the number of cells.

Legend: B batch, H heads, Q and K blocks of queries and keys of the whole mask, I and J those of the shard.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ringspan.caching.registry import on_clear_caches
from ringspan.compat.balancers import Layouts
from ringspan.errors import InputError
from ringspan.masks.block_mask import kinds
from ringspan.masks.predicate import MaskMod
from ringspan.masks.survey import FULL, HIDDEN, PARTIAL


class MaskOrigin(NamedTuple):
    """What a sharded mask was made from: the mask of the whole sequence, and the layouts of its queries and keys.

    ``order`` is the name of their order (:mod:`ringspan.compat.shardings`), or None if it is not known.
    """

    whole: BlockMask
    layouts: Layouts
    kv_layouts: Layouts
    order: str | None = None


# By the mask_mod of the shard, which BlockMask.to() and similar methods keep.
_origins: WeakKeyDictionary[MaskMod, MaskOrigin] = WeakKeyDictionary()


# Compiled code does not see mask_mods as objects. It passes on an attribute of theirs: a tensor with a number.
_shard_mods: WeakValueDictionary[int, MaskMod] = WeakValueDictionary()
_numbers = count()


def _register(mask_mod: MaskMod, origin: MaskOrigin) -> None:
    number = next(_numbers)
    _origins[mask_mod], _shard_mods[number] = origin, mask_mod
    mask_mod.ringspan_number = torch.tensor(number)  # type: ignore[attr-defined]


def number_of(block_mask: BlockMask) -> Tensor | None:
    """Return the number of a shard as a tensor, or None for a mask that is not a shard. Dynamo traces this function."""
    number: Tensor | None = getattr(block_mask.mask_mod, "ringspan_number", None)
    return number


def origin_of_number(number: Tensor) -> MaskOrigin:
    """Return what the shard of this number was made from."""
    mask_mod = _shard_mods.get(int(number))
    if mask_mod is None:
        raise InputError("the BlockMask of this call was deleted: keep what _context_parallel_shard returned")
    return _origins[mask_mod]


def origin_of(block_mask: BlockMask) -> MaskOrigin | None:
    """Return what the mask is a shard of, or None for a mask that is not a shard."""
    return _origins.get(block_mask.mask_mod)


def unsharded(block_mask: BlockMask) -> BlockMask:
    """Return the mask of the whole sequence. A mask that is not a shard is returned as it is."""
    origin = origin_of(block_mask)
    return block_mask if origin is None else origin.whole


_rows: WeakKeyDictionary[BlockMask, dict[int, BlockMask]] = WeakKeyDictionary()
on_clear_caches(_rows.clear)


def batch_row(block_mask: BlockMask, row: int) -> BlockMask:
    """Return the mask of one row of the batch, as a batch of one. It is cached, so that it is planned once."""
    rows = _rows.setdefault(block_mask, {})
    if row not in rows:
        whole_mod, own = block_mask.mask_mod, slice(row, row + 1) if block_mask.kv_num_blocks.shape[0] > 1 else slice(None)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return whole_mod(b + row, h, q_idx, kv_idx)

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


def shard_block_mask(
    whole: BlockMask, layouts: Layouts, rank: int, kv_layouts: Layouts | None = None, *, order: str | None = None
) -> BlockMask:
    """Return the mask of this rank's queries over all keys, in rank order. ``kv_layouts`` default to ``layouts``."""
    kv_layouts = layouts if kv_layouts is None else kv_layouts
    kinds_BHQK = kinds(whole)
    rows = kinds_BHQK.shape[0]
    if 1 not in (len(layouts), rows) and len(layouts) != rows:
        raise InputError(f"the balancer has {len(layouts)} rows and the BlockMask {rows}: both must be for the same batch")
    q_block, kv_block = whole.BLOCK_SIZE
    q_tokens = [_in_blocks(layout.positions(rank), q_block) for layout in layouts]
    k_tokens = [_in_blocks(layout.order(), kv_block) for layout in kv_layouts]
    overlap_IQ = [_overlap(tokens, q_block, kinds_BHQK.shape[2]).to(kinds_BHQK.device) for tokens in q_tokens]
    overlap_JK = [_overlap(tokens, kv_block, kinds_BHQK.shape[3]).to(kinds_BHQK.device) for tokens in k_tokens]
    kinds_BHIJ = torch.cat(
        [
            _shard_kinds(kinds_BHQK[b % rows : b % rows + 1], overlap_IQ[b % len(layouts)], overlap_JK[b % len(layouts)])
            for b in range(max(rows, len(layouts)))
        ]
    )
    flat = [torch.from_numpy(np.stack([t.ravel() for t in tokens])).to(kinds_BHQK.device) for tokens in (q_tokens, k_tokens)]
    mask_mod = _sharded_mask_mod(whole, kinds_BHQK, *flat)
    _register(mask_mod, MaskOrigin(whole, layouts, kv_layouts, order))
    return BlockMask.from_kv_blocks(
        *_block_lists(kinds_BHIJ == PARTIAL),
        *_block_lists(kinds_BHIJ == FULL),
        BLOCK_SIZE=whole.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=(layouts[0].counts[rank], kv_layouts[0].length),
    )


def _in_blocks(tokens: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the tokens as (blocks, block size). The last block repeats its last token, which kernels ignore."""
    padding = (0, -len(tokens) % size)
    return np.pad(tokens, padding, mode="edge").reshape(-1, size) if len(tokens) else np.zeros((0, size), dtype=np.int64)


def _overlap(tokens_by_block: NDArray[np.int64], size: int, blocks: int) -> Tensor:
    """Return 1.0 where a block of the shard has a token of a block of the whole mask, else 0.0."""
    overlap = torch.zeros(len(tokens_by_block), blocks)
    return overlap.scatter_(1, torch.from_numpy(tokens_by_block // size), 1.0)


def _shard_kinds(kinds_BHQK: Tensor, overlap_IQ: Tensor, overlap_JK: Tensor) -> Tensor:
    some_visible_BHIJ = overlap_IQ @ (kinds_BHQK != HIDDEN).float() @ overlap_JK.T > 0
    some_not_full_BHIJ = overlap_IQ @ (kinds_BHQK != FULL).float() @ overlap_JK.T > 0
    return torch.where(some_not_full_BHIJ, torch.where(some_visible_BHIJ, PARTIAL, HIDDEN), FULL)


def _block_lists(selected_BHIJ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of selected blocks in each row of blocks, and all block indices, the selected ones first."""
    order = selected_BHIJ.int().argsort(dim=-1, descending=True, stable=True)
    return selected_BHIJ.sum(dim=-1).int(), order.int()


def _sharded_mask_mod(whole: BlockMask, kinds_BHQK: Tensor, q_tokens: Tensor, k_tokens: Tensor) -> MaskMod:
    """Return the mask_mod of a shard: it translates local to global token indices and evaluates the whole mask."""
    whole_mod, (q_block, kv_block) = whole.mask_mod, whole.BLOCK_SIZE
    by_row, rows, heads = int(len(q_tokens) > 1), int(kinds_BHQK.shape[0] > 1), int(kinds_BHQK.shape[1] > 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q, k = q_tokens[b * by_row, q_idx], k_tokens[b * by_row, kv_idx]
        kind = kinds_BHQK[b * rows, h * heads, q // q_block, k // kv_block]
        return (kind == FULL) | ((kind == PARTIAL) & whole_mod(b, h, q, k))

    return mask_mod
