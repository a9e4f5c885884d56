"""The attention of XLM, which makes its masks itself.

``XLMModel`` has a mask tensor of the tokens that it gets, which are those of this rank. So the layer's attention is
computed here, under the same mask of the whole sequence: causal, or without padding.

Legend: B batch, H heads, S tokens of this rank, F features, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ringspan.errors import UnplannedAttention
from ringspan.integrations.transformers.layer_mask import LayerMask
from ringspan.integrations.transformers.masks import ringspan_mask
from ringspan.integrations.transformers.model_block import block_of_model
from ringspan.integrations.transformers.model_call import documents_of_call
from ringspan.integrations.transformers.packing import refuse_documents
from ringspan.integrations.transformers.refusals import named_refusals, refuse_layer


def xlm_attention(
    self: Any, original: Callable[..., Any], input: Tensor, mask: Tensor, kv: Any = None, cache: Any = None, **kwargs: Any
) -> Any:
    """Run the forward of ``MultiHeadAttention``. ``mask`` is (B, S, S) if it is causal, else (B, S): no padding."""
    block = block_of_model()
    if block is None:
        return original(self, input, mask, kv=kv, cache=cache, **kwargs)
    with named_refusals(self, block.refuse):
        refuse_documents(documents_of_call(), block.mask, "XLM")
        if kv is not None or (cache is not None and cache.get_seq_length(self.layer_id)):
            raise UnplannedAttention("this layer has keys of another sequence, or of a KV cache: neither is split over ranks")
        batch, count = input.shape[:2]
        is_causal = mask.ndim == 3
        made = ringspan_mask(
            batch,
            count,
            count,
            mask_function=causal_mask_function if is_causal else bidirectional_mask_function,
            attention_mask=None if is_causal else mask,
        )
        assert isinstance(made, LayerMask)
        refuse_layer(self, made.tokens, self.dropout if self.training else 0.0, kwargs)
        shape = (batch, count, self.n_heads, self.head_dim)
        q_BHSD, k_BHSD, v_BHSD = (part(input).view(shape).transpose(1, 2) for part in (self.q_lin, self.k_lin, self.v_lin))
        out_BHSD = made.block_of(None, None, None).attention(q_BHSD, k_BHSD, v_BHSD)
    return (self.out_lin(out_BHSD.transpose(1, 2).reshape(input.shape)),)


def xlm_model(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``XLMModel.forward``. In a block, raise if it would count tokens that are no padding on this rank only."""
    block = block_of_model()
    if block is not None:
        input_ids = args[0] if args else kwargs.get("input_ids")
        attention_mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        has_padding = isinstance(input_ids, Tensor) and bool(torch.any(input_ids == self.pad_index))
        with named_refusals(self, block.refuse):
            if kwargs.get("lengths") is not None or (attention_mask is None and has_padding):
                raise UnplannedAttention(
                    "the batch has padding, and XLM counts the other tokens on this rank only: pass attention_mask="
                    "cp.shard(attention_mask, dim=1), and no lengths"
                )
    return original(self, *args, **kwargs)
