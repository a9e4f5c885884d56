"""The attention function that the layers of a model call.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim; S and T are this rank's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ringspan.errors import RingspanError, UnplannedAttention
from ringspan.frontends.attention_block import under_autocast
from ringspan.frontends.current_block import current_block
from ringspan.frontends.score_mods import softcap as softcap_mod
from ringspan.frontends.score_mods import with_query_sinks, with_sinks
from ringspan.integrations.transformers.convolutions import refuse_documents_of_call
from ringspan.integrations.transformers.doge import KeyBias
from ringspan.integrations.transformers.inkling import RelativeBias
from ringspan.integrations.transformers.layer_mask import LayerMask, limit_of_call
from ringspan.integrations.transformers.model_block import block_of_model
from ringspan.integrations.transformers.refusals import is_cross_attention, layer_name, refuse_layer
from ringspan.integrations.transformers.t5 import distance_bias, has_distance_biases

NAME = "ringspan"


def ringspan_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from this rank's queries (B, H, S, D) to the keys (B, G, T, D) and values (B, G, T, E) of all ranks.

    Called by the layers of a model whose ``attn_implementation`` is ``ringspan``. ``attention_mask`` is the
    :class:`LayerMask` of the layer. Read from the keyword arguments are ``softcap``, ``s_aux`` and ``sinks`` (a sink for
    each head, and for each query), ``position_bias``, ``sliding_window``, ``position_ids`` and ``cu_seq_lens_q``.
    Outside a block, attention is PyTorch's SDPA.
    """
    if isinstance(attention_mask, KeyBias):
        query, key = attention_mask.folded(query, key, scaling or query.shape[-1] ** -0.5)
        scaling, attention_mask = scaling or value.shape[-1] ** -0.5, attention_mask.mask
    if has_distance_biases(module, kwargs) and (block := block_of_model()) is not None:
        kwargs["position_bias"] = distance_bias(kwargs["position_bias"], block)
    if not isinstance(attention_mask, LayerMask):
        out_BSHE = _without_mask(module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs)
        return out_BSHE, None
    try:
        refuse_layer(module, attention_mask.tokens, dropout, kwargs)
        refuse_documents_of_call(module, attention_mask.outer, kwargs.get("cu_seq_lens_q"))
        out_BHSE = _attend(attention_mask, query, key, value, scaling, kwargs)
    except RingspanError as error:
        error.add_note(f"in {layer_name(module)}")
        attention_mask.refuse(error)
        raise
    return out_BHSE.transpose(1, 2).contiguous(), None


def _attend(
    mask: LayerMask, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, kwargs: dict[str, Any]
) -> Tensor:
    if torch.compiler.is_dynamo_compiling() and kwargs.get("cu_seq_lens_q") is None:
        block = mask.block  # the values of position ids are not known while a program is traced
    else:
        block = mask.block_of(kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"), kwargs.get("sliding_window"))
    cap, bias, sinks_H, sinks_BHS1 = (kwargs.get(name) for name in ("softcap", "position_bias", "s_aux", "sinks"))
    q_BHSD, k_BGTD, v_BGTE = under_autocast(query, key, value)
    if all(x is None for x in (cap, bias, sinks_H, sinks_BHS1)):
        return block.attention(q_BHSD, k_BGTD, v_BGTE, scale=scaling)
    score_mod = None if cap is None else softcap_mod(cap)
    if bias is not None:
        if cap is not None:
            raise UnplannedAttention("this layer has a softcap and a bias of its scores, whose order is not known")
        score_mod = bias.score_mod if isinstance(bias, RelativeBias) else bias
    result: Any = block.flex_attention(q_BHSD, k_BGTD, v_BGTE, score_mod, scale=scaling, enable_gqa=True, return_lse=True)
    out_BHSE, lse_BHS = result
    if sinks_BHS1 is not None:
        out_BHSE = with_query_sinks(out_BHSE, lse_BHS, sinks_BHS1.squeeze(-1))
    return out_BHSE if sinks_H is None else with_sinks(out_BHSE, lse_BHS, sinks_H).out


def _without_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attend outside a block by SDPA, or inside a block under the block's own mask."""
    block = current_block()
    if block is None:
        if _has_extras(kwargs):
            raise UnplannedAttention(
                f"{layer_name(module)} has a softcap or sinks, which SDPA does not support: call the model inside a "
                'ContextParallel block, or set_attn_implementation("eager")'
            )
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out
    refuse_layer(module, block.plan.q_layout.length, dropout, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        problem = f"has a mask of shape {tuple(attention_mask.shape)} that is not part of the plan: give it to ContextParallel"
    elif _has_extras(kwargs) or kwargs.get("position_bias") is not None:
        problem = "has a softcap, sinks or a bias of its scores, but no mask of the model"
    elif is_cross_attention(module) and block.mask.is_causal:
        problem = f"sees all keys of another sequence, and the block's mask {block.mask.name} is that of one sequence"
    elif bool(causal) != block.mask.is_causal:
        problem = f"is {'' if causal else 'not '}causal, but the block's mask {block.mask.name} is{' not' if causal else ''}"
    elif limit := limit_of_call(block.mask, kwargs.get("sliding_window"), kwargs.get("cu_seq_lens_q")):
        problem = f"{limit}, but no mask of the model, and the block's mask {block.mask.name} is wider"
    else:
        out_BHSE = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
        return out_BHSE.transpose(1, 2).contiguous()
    raise UnplannedAttention(
        f"{layer_name(module)} {problem}. If the layer is not part of the split sequence (a vision tower, for example), "
        "call it in `with rs.local_attention():`"
    )


def _has_extras(kwargs: dict[str, Any]) -> bool:
    """Return whether a layer has a softcap or sinks, which SDPA does not support."""
    return any(kwargs.get(name) is not None for name in ("s_aux", "sinks", "softcap"))
