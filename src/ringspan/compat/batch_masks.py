"""One mask for all rows of a batch, if the rows differ in their masks or layouts and all masks are bands.

The rows are then one plan: one exchange and one launch, where a plan for each row would need one of each per row, and a
function of the batch index would be evaluated for every pair of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.nn.attention.flex_attention import BlockMask

from ringspan.caching.registry import on_clear_caches
from ringspan.compat.attention_calls import AttentionCall, FlexCall
from ringspan.compat.block_masks import batch_row, unsharded
from ringspan.frontends.dtensor import any_dtensor
from ringspan.frontends.flex import mask_of, versions_of
from ringspan.layouts import Layout
from ringspan.masks import Mask, causal, full


class _RowMasks(NamedTuple):
    """The masks of the rows of a BlockMask, None if one is not made of bands, and the versions of the tensors that they
    follow from."""

    masks: tuple[Mask, ...] | None
    differ: bool
    versions: Any


_known: WeakKeyDictionary[BlockMask, dict[int, _RowMasks]] = WeakKeyDictionary()  # then by the number of rows
on_clear_caches(_known.clear)


def masks_of_rows(call: AttentionCall, pairs: Sequence[tuple[Layout, Layout]]) -> tuple[Mask, ...] | None:
    """Return the mask of each row of the batch, if the rows differ in mask or layout; else None.

    None also if a mask is not made of bands, or the call has a score_mod, which receives the index of the row. Then
    each row has a plan of its own, or the kernels call the function.
    """
    rows, score_mod = call.query.shape[0] if call.query.ndim == 4 else 1, getattr(call, "score_mod", None)
    if rows == 1 or score_mod is not None or any_dtensor(call.query, call.key, call.value):
        return None
    lengths = pairs[0][0].length, pairs[0][1].length
    if not isinstance(call, FlexCall) or call.block_mask is None:
        one = causal(*lengths, align="start") if call.is_causal else full(*lengths)
        return (one,) * rows if len(pairs) > 1 else None
    whole = unsharded(call.block_mask)
    if len(pairs) > 1:
        return _convert(whole, rows, lengths).masks
    if whole.kv_num_blocks.shape[0] != rows:
        return None
    # Rows that do not differ, or are not bands, are not converted again: the other path looks at changed tensors.
    known = _known.get(whole, {}).get(rows)
    if known is not None and (known.masks is None or not known.differ):
        return None
    found = _convert(whole, rows, lengths)
    return found.masks if found.differ else None


def _convert(whole: BlockMask, rows: int, lengths: tuple[int, int]) -> _RowMasks:
    """Convert the rows of a BlockMask to masks. The result is cached until the BlockMask changes."""
    known, versions = _known.setdefault(whole, {}), versions_of(whole)
    found = known.get(rows)
    if found is None or found.versions != versions:
        masks = tuple(mask_of(batch_row(whole, row), lengths) for row in range(rows))
        are_bands = all(mask.predicate is None for mask in masks)
        differ = len({mask.digest for mask in masks}) > 1
        found = known[rows] = _RowMasks(masks if are_bands else None, differ, versions)
    return found
