"""The decoder of ProphetNet: a main stream of tokens, and G streams that predict the next tokens.

Every token has a query in each stream. The queries of all streams attend to the keys of the main stream. A query of a
predicting stream has one more key, its own::

    4 tokens, G = 2           main      stream 0         stream 1
    keys of the main stream   x . . .   x . . .          x . . .
                              x x . .   x x . .          x . . .
                              x x x .   x x x .          x x . .
                              x x x x   x x x x          x x x .
    own key                   none      its own of each  its own of each

So the streams are query heads of one attention over the keys of the main stream. The own key is on the rank of its
query, and is merged into the result. Each query computes a bias for each bucket of distances. As in Inkling, these
biases are gathered, and a ``score_mod`` reads them.

Legend: B batch, N tokens of the whole sequence, S tokens of this rank, H heads, G predicting streams, R = 1 + G
streams, J = H · R query heads, D head dim, M features of the model, K buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ringspan.errors import UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.integrations.transformers.layer_mask import LayerMask, ModelCall
from ringspan.integrations.transformers.mask_functions import Sequence, padding_mask
from ringspan.integrations.transformers.masks import of_whole_sequence
from ringspan.integrations.transformers.model_block import block_of_model, refuse_cache, refuse_weights
from ringspan.integrations.transformers.model_call import documents_of_call
from ringspan.integrations.transformers.packing import refuse_documents
from ringspan.integrations.transformers.refusals import named_refusals, refuse_layer
from ringspan.masks import Mask, Predicate, causal


@dataclass(frozen=True)
class Streams:
    """The argument ``attention_mask`` of the layers in a block, in place of a mask tensor.

    ``mask`` has a head for each head and stream, heads first. ``buckets_N`` are the buckets of the distances 0 to N.
    """

    outer: ContextParallel
    mask: LayerMask
    buckets_N: Tensor


def prophetnet_decoder(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``ProphetNetDecoder.forward``. In a block, raise if it should return attention weights or continue a KV
    cache."""
    block = block_of_model()
    if block is not None:
        with named_refusals(self, block.refuse):
            refuse_weights("prophetnet", kwargs.get("output_attentions"), self.config)
            refuse_cache(kwargs.get("past_key_values"))
    return original(self, *args, **kwargs)


def prophetnet_positions(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``ProphetNetPositionalEmbeddings.forward``. In a block, return the positions of this rank's tokens."""
    block = block_of_model()
    if block is None:
        return original(self, *args, **kwargs)
    shape = args[0] if args else kwargs["inputs_shape"]
    counted = block.positions(device=self.weight.device) + 1 + self.padding_idx
    # The predicting streams have the position after that of their token.
    tokens, limit = block.plan.q_layout.length, self.max_length - 2 - self.padding_idx
    with named_refusals(self, block.refuse):
        if len(counted) != shape[1]:
            raise UnplannedAttention(
                f"this rank has {len(counted)} tokens of the sequence, and the model got {shape[1]}: pass cp.shard(input_ids, "
                "dim=1), and no past_key_values"
            )
        if tokens > limit:
            raise UnplannedAttention(
                f"the sequence has {tokens} tokens, but max_position_embeddings={self.max_length} is enough for {limit}"
            )
    position_ids_BS = counted.expand(*shape)
    return self._forward(position_ids_BS), position_ids_BS


def prophetnet_masks(self: Any, original: Callable[..., Any], hidden_BSM: Tensor, attention_mask: Tensor | None) -> Any:
    """Run ``ProphetNetDecoder.prepare_attention_mask``. In a block, return what the layers need of it."""
    from transformers.models.prophetnet.modeling_prophetnet import compute_relative_buckets

    block = block_of_model()
    if block is None:
        return original(self, hidden_BSM, attention_mask)
    with named_refusals(self, block.refuse):
        _refuse_mask(block)
        refuse_documents(documents_of_call(), block.mask, "ProphetNet")
        n = block.plan.q_layout.length
        sequence = Sequence(n, n)
        mask = _stream_mask(n, self.ngram + 1, self.config.num_decoder_attention_heads)
        valid_BN = None if attention_mask is None else of_whole_sequence(attention_mask, block, "q").bool()
        if valid_BN is not None and not valid_BN.all():
            mask = mask & padding_mask(valid_BN, sequence)
        layer_mask = LayerMask(mask, block, ("q", "kv"), ModelCall(len(hidden_BSM), valid_BN, None))
        distances = torch.arange(n + 1, device=hidden_BSM.device)
        buckets_N = compute_relative_buckets(self.num_buckets, self.relative_max_distance, -distances).long()
    return Streams(block, layer_mask, buckets_N)


def no_local_masks(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a method of ``ProphetNetDecoder`` that makes a tensor for each pair of tokens. In a block, return None."""
    return original(self, *args, **kwargs) if block_of_model() is None else None


def no_local_buckets(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``ProphetNetDecoder.compute_buffered_relative_buckets``. In a block, return None twice."""
    return original(self, *args, **kwargs) if block_of_model() is None else (None, None)


def prophetnet_attention(
    self: Any,
    original: Callable[..., Any],
    hidden_states: Tensor,
    past_key_values: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """Run ``ProphetNetNgramSelfAttention.forward``, in a block over all ranks. It returns no weights then."""
    if not isinstance(attention_mask, Streams):
        return original(self, hidden_states, past_key_values, attention_mask, **kwargs)
    streams = attention_mask
    with named_refusals(self, streams.outer.refuse):
        refuse_cache(past_key_values, self.layer_idx or 0)
        refuse_layer(self, streams.mask.tokens, self.attention_dropout if self.training else 0.0, {})
        hidden_BRSM = hidden_states.unflatten(1, (1 + self.ngram, -1))
        out_BRSM = self.out_proj(_attend(self, hidden_BRSM, streams))
    return torch.nn.functional.dropout(out_BRSM.flatten(1, 2), p=self.dropout, training=self.training), None, None


def refuse_encoder(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``ProphetNetAttention.forward``. In a block, raise: it is attention in or to the encoder."""
    block = block_of_model()
    if block is None:
        return original(self, *args, **kwargs)
    with named_refusals(self, block.refuse):
        raise UnplannedAttention(
            "prophetnet has an encoder in this call, whose layers cannot run under context parallelism: only the decoder "
            "(ProphetNetForCausalLM, without encoder_hidden_states) can"
        )


def _attend(layer: Any, hidden_BRSM: Tensor, streams: Streams) -> Tensor:
    """Return the attention (B, R, S, M) of all streams."""
    shape = (layer.num_attn_heads, layer.head_dim)
    q_BRSHD, k_BRSHD, v_BRSHD = (
        project(hidden_BRSM).unflatten(-1, shape) for project in (layer.query_proj, layer.key_proj, layer.value_proj)
    )
    q_BHRSD = (q_BRSHD / layer.head_dim**0.5).permute(0, 3, 1, 2, 4)
    k_BHSD, v_BHSD = (x[:, 0].transpose(1, 2) for x in (k_BRSHD, v_BRSHD))
    bias_BJNK = _biases(layer, hidden_BRSM, streams.outer)
    result: Any = streams.mask.block.flex_attention(
        q_BHRSD.flatten(1, 2),
        k_BHSD,
        v_BHSD,
        _score_mod(bias_BJNK, streams.buckets_N, 1 + layer.ngram),
        scale=1.0,
        enable_gqa=True,
        return_lse=True,
    )
    out_BHRSD, lse_BHRS = (x.unflatten(1, (-1, 1 + layer.ngram)) for x in result)

    # The own keys of the predicting streams: distance 0, and on this rank.
    mine_S = streams.outer.positions(device=bias_BJNK.device)
    own_bias_BHRS = bias_BJNK[:, :, mine_S, 0].unflatten(1, (-1, 1 + layer.ngram))
    own_k_BHGSD, own_v_BHGSD = (x[:, 1:].permute(0, 3, 1, 2, 4) for x in (k_BRSHD, v_BRSHD))
    own_BHGS = (q_BHRSD[:, :, 1:] * own_k_BHGSD).sum(-1) + own_bias_BHRS[:, :, 1:]
    share_BHGS1 = torch.sigmoid(lse_BHRS[:, :, 1:] - own_BHGS).unsqueeze(-1).to(own_v_BHGSD.dtype)
    merged_BHGSD = out_BHRSD[:, :, 1:] * share_BHGS1 + own_v_BHGSD * (1 - share_BHGS1)
    out_BHRSD = torch.cat([out_BHRSD[:, :, :1], merged_BHGSD], dim=2)
    return out_BHRSD.permute(0, 2, 3, 1, 4).flatten(-2)


def _biases(layer: Any, hidden_BRSM: Tensor, block: ContextParallel) -> Tensor:
    """Return the biases (B, J, N, K) of all queries of all ranks."""
    made_BRSKH = layer.relative_pos_embeddings(hidden_BRSM).unflatten(-1, (layer.num_buckets, layer.num_attn_heads))
    bias_BRNKH = block.unshard(made_BRSKH, dim=2, grad="partial")
    main_B1HNK = bias_BRNKH[:, :1].permute(0, 1, 4, 2, 3)
    # transformers (5.22, 5.23) writes the biases of the predicting streams in the order (token, stream, head), and reads
    # them in the order (stream, head, token). A query then has the biases of another one, perhaps of another rank.
    written_BNGHK = bias_BRNKH[:, 1:].permute(0, 2, 1, 4, 3)
    batch, n, streams, heads, buckets = written_BNGHK.shape
    read_BGHNK = written_BNGHK.reshape(batch, streams, heads, n, buckets)
    return torch.cat([main_B1HNK, read_BGHNK], dim=1).transpose(1, 2).flatten(1, 2)


def _score_mod(bias_BJNK: Tensor, buckets_N: Tensor, streams: int) -> Any:
    def biased(score: Tensor, b: Tensor, j: Tensor, q: Tensor, k: Tensor) -> Tensor:
        is_predicting = (j % streams > 0).long()  # these queries are those of the next position
        return score + bias_BJNK[b, j, q, buckets_N[(q - k).clamp(min=0) + is_predicting]]

    return biased


def _stream_mask(n: int, streams: int, heads: int) -> Mask:
    """Return the mask of the queries of all streams and the keys of the main stream, for J query heads.

    The main stream and stream 0 are causal. Stream g sees the first key, and those that are at least g tokens before.
    """

    def sees(b: Any, j: Any, q: Any, k: Any) -> Any:
        return (k <= q - (j % streams - 1)) | (k == 0)

    if streams <= 2:
        return causal(n)
    predicate = Predicate(functions=(sees,), fingerprint=f"streams of prophetnet: {streams}", heads=heads * streams)
    return Mask(causal(n).table, n, n, name=f"{streams - 1} streams over causal({n})", predicate=predicate)


def _refuse_mask(block: ContextParallel) -> None:
    mask = block.mask
    if block.plan.q_layout != block.plan.kv_layout:
        _refuse("the block is a cross-attention")
    if mask.predicate is not None or len(mask.documents()) > 2:
        _refuse(
            f"the block's mask {mask.name} may have documents, and each predicting query sees the first key of the sequence"
        )


def _refuse(why: str) -> NoReturn:
    raise UnplannedAttention(f"{why}: give ContextParallel rs.causal(length)")
