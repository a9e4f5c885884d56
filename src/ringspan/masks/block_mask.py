"""A FlexAttention BlockMask as a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringspan.errors import MaskError
from ringspan.masks.mask import Mask
from ringspan.masks.mask_mod import mask_mod
from ringspan.masks.predicate import MaskMod

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

HIDDEN, PARTIAL, FULL = range(3)


def block_mask(mask: BlockMask) -> Mask:
    """What the compiled FlexAttention makes of a BlockMask, here of the *whole* sequence: a block is hidden, seen in full, or
    left to the ``mask_mod``. (Uncompiled, FlexAttention asks the ``mask_mod`` alone.)

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> block_mask(create_block_mask(lambda b, h, q, k: k <= q, None, None, 300, 300, device="cpu"))
    <Mask block_mask(<lambda>): 300 × 300, area 45150, 1 band>
    """
    from ringspan.user_functions.index_reads import inputs_read

    try:
        (q_len, k_len), (batch, heads, *_) = mask.shape[-2:], mask.kv_num_blocks.shape
        q_block, k_block = mask.BLOCK_SIZE
    except (AttributeError, TypeError, ValueError):
        raise MaskError(f"expected a BlockMask of FlexAttention, got {type(mask).__name__}") from None
    function = _sees(mask, batch, heads)
    looks_at = inputs_read(function, (q_len, k_len))
    made = mask_mod(
        function,
        q_len,
        k_len,
        # A BlockMask for any batch and one for a batch of one look alike: what the function reads tells them apart.
        batch=batch if looks_at.batch else None,
        heads=heads if looks_at.heads else None,
        block=(q_block, k_block),
    )
    name = f"block_mask({getattr(mask.mask_mod, '__name__', 'mask_mod')})"
    return Mask(made.table, q_len, k_len, name=name, predicate=made.predicate)


def _sees(mask: BlockMask, batch: int, heads: int) -> MaskMod:
    """Blocks and mask_mod as one function of a pair."""
    kind_BHQK, inner, (q_block, k_block) = kinds(mask), mask.mask_mod, mask.BLOCK_SIZE
    told_apart = [n > 1 for n in (batch, heads)]
    told = kind_BHQK[tuple(slice(None) if apart else 0 for apart in told_apart)]

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        member = [index for index, apart in zip((b, h), told_apart, strict=True) if apart]
        kind = told[(*member, q // q_block, k // k_block)]
        return (kind == FULL) | ((kind == PARTIAL) & inner(b, h, q, k))

    return sees


def kinds(mask: BlockMask) -> Tensor:
    """What each block is."""
    import torch

    columns = -(-mask.shape[-1] // mask.BLOCK_SIZE[1])
    lists = [(PARTIAL, mask.kv_num_blocks, mask.kv_indices), (FULL, mask.full_kv_num_blocks, mask.full_kv_indices)]
    kind_BHQK = torch.full((*mask.kv_num_blocks.shape, columns + 1), HIDDEN, dtype=torch.int8, device=mask.kv_indices.device)
    for kind, counts, indices in lists:
        if counts is not None and indices is not None:
            # A list is as long as its count; what is behind goes to a column of its own.
            listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
            kind_BHQK.scatter_(-1, torch.where(listed, indices, columns).long(), kind)
    return kind_BHQK[..., :columns]
