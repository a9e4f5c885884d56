"""The mask function that transformers calls for each kind of layer, once in each forward pass.

It does not return a tensor: inside a block, no rank has all tokens of a mask. It returns a
:class:`~ringspan.integrations.transformers.layer_mask.LayerMask`, which the model hands on to its layers, and which
holds the block to attend in: the layout of the user's block, with the mask of the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from ringspan.errors import InputError, RingspanError, UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.recompute import entered_blocks, was_absent_in_forward
from ringspan.integrations.transformers.layer_mask import LayerMask, ModelCall, layout_of
from ringspan.integrations.transformers.mask_functions import Sequence, mask_of, padding_mask
from ringspan.integrations.transformers.model_block import Sides, block_of_model
from ringspan.integrations.transformers.model_call import documents_of_call, positions_of_model, refuse_results_of_tokens_here
from ringspan.integrations.transformers.packing import check_positions, missing_positions, packed_ids, positions_of_mask
from ringspan.integrations.transformers.refusals import COUNTS_POSITIONS, WRITES_OUT, first_position, refuse_config
from ringspan.integrations.transformers.rotary import refuse_rotary
from ringspan.masks import Mask
from ringspan.plans.data import Side


@torch.compiler.disable
def ringspan_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | LayerMask | None = None,
    config: Any = None,
    **kwargs: Any,
) -> LayerMask | Tensor | None:
    """Return the mask of a kind of layer: a LayerMask inside a block, outside of one what SDPA takes.

    The arguments are those of ``AttentionMaskInterface``. ``attention_mask`` marks the keys that are no padding, for
    the tokens of this rank or for the whole sequence. A mask that was made before, by the model around this one
    (PaliGemma), is returned as it is, as transformers does with mask tensors.
    """
    if isinstance(attention_mask, LayerMask):
        return attention_mask
    outer = block_of_model()
    if outer is None:
        given = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask}
        # layers that write attention out add the mask to their scores
        make = eager_mask if getattr(config, "model_type", None) in WRITES_OUT else sdpa_mask
        return make(batch_size, q_length, kv_length, **given, config=config, **kwargs)
    refuse_config(config)
    if outer.plan.world > 1:
        refuse_results_of_tokens_here()
    if int(q_offset) or int(kv_offset):
        raise UnplannedAttention(
            f"this call continues a KV cache of {int(q_offset)} tokens, which is not split over ranks: pass no past_key_values"
        )
    sides = _sides(outer, q_length, kv_length)
    refuse_rotary(config, layout_of(outer, sides[0]).length)
    sequence = _sequence(outer, sides, mask_function, attention_mask)
    call = _model_call(batch_size, sequence, mask_function, config)
    try:
        mask = mask_of(mask_function, sequence)
        _refuse_two_directions(config, mask)
        if sequence.padding_BN is not None and not sequence.padding_BN.all():
            mask = mask & padding_mask(sequence.padding_BN, sequence)
    except RingspanError as error:  # raised by the layers that use this mask, if any does
        return LayerMask(sequence.full, outer, sides, call, refusal=error)
    return LayerMask(mask, outer, sides, call)


def _refuse_two_directions(config: Any, mask: Mask) -> None:
    """Raise for Gemma and PaliGemma, whose layers can see later tokens, if the mask hides these and the config does not
    decide."""
    sees_later = getattr(config, "use_bidirectional_attention", None) is True and getattr(config, "is_causal", None) is None
    if sees_later and mask.is_causal and mask.lengths[0] > 1:
        raise UnplannedAttention(
            f"{config.model_type} has use_bidirectional_attention=True and a causal mask: by sdpa transformers leaves the mask "
            "out, and by eager it uses it. Set config.is_causal to False to see later tokens, or to True to see none"
        )


def _sequence(outer: ContextParallel, sides: Sides, mask_function: Any, attention_mask: Tensor | None) -> Sequence:
    """Return what the mask of a call is made from. All ranks must call it: a padding mask of this rank is gathered."""
    q_len, k_len = (layout_of(outer, side).length for side in sides)
    sequence = Sequence(
        q_len,
        k_len,
        gathered=lambda x_BS: outer.unshard(x_BS, dim=1, of=sides[1]),
        positions=positions_of_mask(mask_function, _has_documents(outer.mask)),
    )
    if attention_mask is None:
        return sequence
    return sequence._replace(padding_BN=of_whole_sequence(attention_mask, outer, sides[1]))


def _model_call(batch: int, sequence: Sequence, mask_function: Any, config: Any) -> ModelCall:
    call = ModelCall(batch, sequence.padding_BN, packed_ids(mask_function), first=first_position(config))
    call = call._replace(cu_seq_lens=documents_of_call())
    if config is None or config.model_type not in COUNTS_POSITIONS:
        call = call._replace(positions=positions_of_model())
    return call


def sdpa_mask_of_block(*args: Any, local_size: int | None = None, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Return the mask of a layer that attends by the name ``sdpa``, as transformers makes it.

    Inside a block over several ranks, the model is refused for what a model that attends by ``ringspan`` is refused for,
    since the block itself sees only calls of attention. And transformers makes no mask of a window or of chunks that are
    longer than the tokens that it sees. These are this rank's, so the layer would attend without the window: this raises.
    """
    blocks = [] if torch.compiler.is_compiling() else entered_blocks()
    block = blocks[-1] if blocks and isinstance(blocks[-1], ContextParallel) else None
    if block is not None and block.plan.world > 1 and not was_absent_in_forward(block):
        _refuse_sdpa(config, block, kwargs.get("attention_mask"))
    made: Tensor | None = sdpa_mask(*args, local_size=local_size, config=config, **kwargs)
    if made is not None or local_size is None:
        return made  # in compiled code transformers always makes it, and the block refuses the tensor
    if block is not None and local_size < block.plan.kv_layout.length:
        raise UnplannedAttention(
            f"this model attends by sdpa, which leaves out windows and chunks of {local_size} tokens, since this rank has no "
            'more: call model.set_attn_implementation("ringspan")'
        )
    return made


def _refuse_sdpa(config: Any, block: ContextParallel, padding: Tensor | None) -> None:
    """Raise if a model that attends by ``sdpa`` computes more than attention from the tokens of this rank alone."""
    refuse_config(config)
    refuse_rotary(config, max(layout_of(block, "q").length, layout_of(block, "kv").length))
    refuse_results_of_tokens_here()
    if padding is not None and not padding.all():
        return  # transformers makes a tensor of it, which the block refuses; positions may count from the padding
    is_known, position_ids = positions_of_model()
    if not is_known:
        return
    if position_ids is None:
        raise missing_positions(first_position(config))
    if block.plan.q_layout == block.plan.kv_layout:  # else it is not known whose positions these are
        tokens = block.plan.q_layout.positions(block.rank)
        try:
            check_positions(position_ids, tokens, block.mask, None, first=first_position(config))
        except RingspanError as error:  # those of another rank can be right, and it would wait for messages
            block.refuse(error)
            raise


def _has_documents(mask: Mask) -> bool:
    """Return whether a mask has several documents, or may have them."""
    return mask.predicate is not None or (mask.lengths[0] == mask.lengths[1] and len(mask.documents()) > 2)


def _sides(outer: ContextParallel, q_length: int, kv_length: int) -> Sides:
    """Return which sequences of the block the queries and the keys belong to: in a cross-attention block there are two.

    The lengths are those of this rank's tensors; that of the keys can also be that of the whole sequence, if the call
    has a padding mask.
    """
    possible: list[Sides] = [("q", "kv"), ("q", "q"), ("kv", "kv")]
    if outer.plan.q_layout == outer.plan.kv_layout:
        possible = possible[:1]

    def agrees(length: int, side: Side, *, or_whole: bool) -> bool:
        layout = layout_of(outer, side)
        return length == layout.counts[outer.rank] or (or_whole and length == layout.length)

    found = [(q, k) for q, k in possible if agrees(q_length, q, or_whole=False) and agrees(kv_length, k, or_whole=True)]
    counts = {side: layout_of(outer, side).counts[outer.rank] for side in ("q", "kv")}
    if not found:
        raise InputError(
            f"this layer has {q_length} queries and {kv_length} keys on rank {outer.rank}, but the block gives the rank "
            f"{counts['q']} queries and {counts['kv']} keys: shard the inputs of the model with cp.shard, or wrap a layer that "
            "is not part of the split sequence in `with rs.local_attention():`"
        )
    if len(found) > 1:
        raise InputError(
            f"rank {outer.rank} has {counts['q']} tokens of both sequences of this cross-attention, so that the layers of the "
            "encoder and of the decoder cannot be told apart: use a layout with other numbers of tokens"
        )
    return found[0]


def of_whole_sequence(attention_mask: Tensor, outer: ContextParallel, side: Side) -> Tensor:
    """Return a padding mask (B, tokens) of the whole sequence, from one of this rank's tokens or of all."""
    layout = layout_of(outer, side)
    if attention_mask.shape[-1] == layout.length:
        return attention_mask
    return outer.unshard(attention_mask.to(dtype=torch.uint8), dim=1, of=side).bool()
