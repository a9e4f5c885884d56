"""Attention for Hugging Face ``transformers``, under the name ``ringspan``. Importing this package registers it.

::

    import ringspan as rs
    import ringspan.integrations.transformers                   # registers "ringspan"

    model.set_attn_implementation("ringspan")
    cp = rs.ContextParallel(mesh["cp"], rs.causal(length))      # rs.documents(lengths) for a packed batch
    ids, labels = cp.shard(ids, rs.shift_labels(ids), dim=1)
    with cp:
        logits = model(input_ids=ids, position_ids=cp.positions()[None], use_cache=False).logits

The mask of a layer is the mask that the model makes for it (causal, sliding window, chunks, padding, image blocks),
intersected with the mask of the block. Softcap, sinks and scale are those of the layer. What cannot be made exact
raises :class:`ringspan.UnplannedAttention` and names the layer. Outside a block the name means PyTorch's SDPA.

Models that count positions themselves, write attention out in their layers or add biases to scores (Bart, GPT-J, Bloom,
T5, …) need ``prepare(model)`` in place of ``set_attn_implementation``; the error of such a model says so.

Tensors with one row per token (ids, embeddings, positions) are this rank's. Tensors that describe the sequence for the
mask (``attention_mask``, ``cu_seq_lens_q``, ``token_type_ids`` of images or a prefix) are those of the whole sequence,
on every rank.
"""

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from ringspan.integrations.transformers.attention import NAME, ringspan_attention
from ringspan.integrations.transformers.masks import ringspan_mask, sdpa_mask_of_block
from ringspan.integrations.transformers.packing import packed_mask
from ringspan.integrations.transformers.prepare import prepare

AttentionInterface.register(NAME, ringspan_attention)
AttentionMaskInterface.register(NAME, ringspan_mask)
if ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask:  # and not one of the user
    AttentionMaskInterface.register("sdpa", sdpa_mask_of_block)

__all__ = ["NAME", "packed_mask", "prepare", "ringspan_attention", "ringspan_mask"]
