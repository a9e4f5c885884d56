"""A FlexAttention BlockMask as a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringspan.errors import MaskError
from ringspan.masks.mask import Mask
from ringspan.masks.mask_mod import mask_of_survey
from ringspan.masks.predicate import MaskMod, Predicate
from ringspan.torch_private.tensor_version import tensor_version

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask


def block_mask(mask: BlockMask) -> Mask:
    """Return a BlockMask of the *whole* sequence as a mask, as the compiled FlexAttention reads it.

    A block is hidden, full or partial, and the ``mask_mod`` applies in partial blocks only. (Without ``torch.compile``,
    FlexAttention ignores the blocks and calls the ``mask_mod`` for all pairs.) The ``mask_mod`` is evaluated in partial
    blocks. If these are too many, the kernels call it instead.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> block_mask(create_block_mask(lambda b, h, q, k: k <= q, None, None, 300, 300, device="cpu"))
    <Mask block_mask(<lambda>): 300 × 300, area 45150, 1 band>
    """
    from torch.nn.attention.flex_attention import noop_mask

    from ringspan.masks.survey import FULL, PARTIAL, survey_blocks
    from ringspan.user_functions.index_reads import inputs_read

    try:
        (q_len, k_len), (batch, heads, *_) = mask.shape[-2:], mask.kv_num_blocks.shape
        q_block, k_block = mask.BLOCK_SIZE
    except (AttributeError, TypeError, ValueError):
        raise MaskError(f"expected a BlockMask of FlexAttention, got {type(mask).__name__}") from None
    lengths, block = (q_len, k_len), (q_block, k_block)
    kinds_BHQK = kinds(mask)
    if mask.mask_mod is noop_mask:  # all pairs are visible
        kinds_BHQK[kinds_BHQK == PARTIAL] = FULL
    function = _pair_function(kinds_BHQK, mask.mask_mod, block)
    # A BlockMask for any batch and one for a batch of one have tables of the same shape. They differ in what is read.
    read = inputs_read(function, lengths)
    of_members = kinds_BHQK.cpu().numpy()
    found = survey_blocks(
        mask.mask_mod,
        {(b, h): of_members[b, h] for b in range(batch if read.batch else 1) for h in range(heads if read.heads else 1)},
        lengths,
        block,
        read.device,
    )
    predicate = Predicate(
        functions=(function,),
        fingerprint=found.fingerprint,
        batch=batch if read.batch else None,
        heads=heads if read.heads else None,
        captured=tuple((x, tensor_version(x)) for x in read.captured if not x.is_inference()),
    )
    name = f"block_mask({getattr(mask.mask_mod, '__name__', 'mask_mod')})"
    return mask_of_survey(found, predicate, lengths, block, name)


def _pair_function(kinds_BHQK: Tensor, mask_mod: MaskMod, block: tuple[int, int]) -> MaskMod:
    """Combine the block table and the mask_mod into one function of a pair."""
    from ringspan.masks.survey import FULL, PARTIAL

    (q_block, k_block), (batch, heads, *_) = block, kinds_BHQK.shape
    reads_batch, reads_heads = batch > 1, heads > 1
    table = kinds_BHQK[slice(None) if reads_batch else 0, slice(None) if reads_heads else 0]

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        member = (*([b] if reads_batch else []), *([h] if reads_heads else []))
        kind = table[(*member, q // q_block, k // k_block)]
        return (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, q, k))

    return is_visible


def kinds(mask: BlockMask) -> Tensor:
    """Return the kind of each block: HIDDEN, PARTIAL or FULL."""
    import torch

    from ringspan.masks.survey import FULL, HIDDEN, PARTIAL

    columns = -(-mask.shape[-1] // mask.BLOCK_SIZE[1])
    lists = [(PARTIAL, mask.kv_num_blocks, mask.kv_indices), (FULL, mask.full_kv_num_blocks, mask.full_kv_indices)]
    kind_BHQK = torch.full((*mask.kv_num_blocks.shape, columns + 1), HIDDEN, dtype=torch.int8, device=mask.kv_indices.device)
    for kind, counts, indices in lists:
        if counts is not None and indices is not None:
            # Entries after the count of a list are not valid. They are written to an extra column.
            listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
            kind_BHQK.scatter_(-1, torch.where(listed, indices, columns).long(), kind)
    return kind_BHQK[..., :columns]
