"""The block that a method of a model runs in, the blocks with the masks of its layers, and what several models refuse
in one."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ringspan.caching.registry import on_clear_caches
from ringspan.errors import UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.current_block import current_block
from ringspan.frontends.recompute import entered_blocks, keep_blocks, was_absent_in_forward
from ringspan.masks import Mask
from ringspan.plans.data import Side

Sides = tuple[Side, Side]  # the sequences of the queries and of the keys


def block_of_model() -> ContextParallel | None:
    """Return the block that the caller runs in; None outside a block.

    A checkpoint around the caller will run it in the same block again.
    """
    block = current_block()
    if block is None or was_absent_in_forward(block):
        return None
    keep_blocks(entered_blocks())
    return block


def refuse_cache(past_key_values: Any, layer: int = 0) -> None:
    """Raise if a call continues a KV cache."""
    if past_key_values is not None and past_key_values.get_seq_length(layer):
        raise UnplannedAttention("this call continues a KV cache, which is not split over ranks: pass no past_key_values")


def refuse_weights(model_type: str, output_attentions: bool | None, config: Any) -> None:
    """Raise if a model should return its attention weights."""
    if config.output_attentions if output_attentions is None else output_attentions:
        raise UnplannedAttention(f"{model_type} should return its weights, which no rank has: output_attentions=False")


MAX_BLOCKS = 64  # cached for one block of the user; a padded batch has a mask of its own
_blocks: WeakKeyDictionary[ContextParallel, dict[tuple[Sides, str], ContextParallel]] = WeakKeyDictionary()
on_clear_caches(_blocks.clear)


def block_with_mask(outer: ContextParallel, sides: Sides, mask: Mask) -> ContextParallel:
    """Return the user's block with the mask of a layer, on the same layout. It is made once."""
    known = _blocks.setdefault(outer, {})
    key = (sides, mask.digest)
    if key not in known:
        if len(known) >= MAX_BLOCKS:
            known.clear()
        known[key] = outer.with_mask(mask, sides=sides)
    return known[key]
