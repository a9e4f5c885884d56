"""One mask for all rows of a batch, if the rows differ in their masks or layouts and all masks are bands.

The rows are then one plan: one exchange and one launch, where a plan for each row would need one of each per row, and a
function of the batch index would be evaluated for every pair of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.attention.flex_attention import BlockMask

from ringspan.compat.attention_calls import AttentionCall, FlexCall
from ringspan.compat.block_masks import batch_row, unsharded
from ringspan.frontends.dtensor import any_dtensor
from ringspan.frontends.flex import mask_of
from ringspan.layouts import Layout
from ringspan.masks import Mask, causal, full


def masks_of_rows(call: AttentionCall, pairs: Sequence[tuple[Layout, Layout]]) -> tuple[Mask, ...] | None:
    """Return the mask of each row of the batch, if the rows differ in mask or layout; else None.

    None also if a mask is not made of bands, or the call has a score_mod, which receives the index of the row. Then
    each row has a plan of its own, or the kernels call the function.
    """
    rows = call.query.shape[0] if call.query.ndim == 4 else 1
    if rows == 1 or any_dtensor(call.query, call.key, call.value):
        return None
    lengths = pairs[0][0].length, pairs[0][1].length
    if not isinstance(call, FlexCall) or call.block_mask is None:
        one = causal(*lengths, align="start") if call.is_causal else full(*lengths)
        return (one,) * rows if len(pairs) > 1 and not _has_score_mod(call) else None
    whole = unsharded(call.block_mask)
    if call.score_mod is not None or (len(pairs) == 1 and whole.kv_num_blocks.shape[0] != rows):
        return None
    masks = tuple(_row_mask(whole, row, lengths) for row in range(rows))
    if any(mask.predicate is not None for mask in masks):
        return None
    return masks if len(pairs) > 1 or len({mask.digest for mask in masks}) > 1 else None


def _row_mask(whole: BlockMask, row: int, lengths: tuple[int, int]) -> Mask:
    return mask_of(batch_row(whole, row), lengths)


def _has_score_mod(call: AttentionCall) -> bool:
    return isinstance(call, FlexCall) and call.score_mod is not None
