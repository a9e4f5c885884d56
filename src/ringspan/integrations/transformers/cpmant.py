"""CPM-Ant, which puts a prompt of P learned tokens before the sequence.

In one process the model does so in every call. Here the prompt is on the first rank, and the layers attend in a block
over P + N tokens::

    2 ranks, zigzag, N = 8, P = 2      rank 0: p0 p1 t0 t1 t6 t7      rank 1: t2 t3 t4 t5

Every token sees all others, also those after it. Scores have a bias for each head, which depends on the distance of two
tokens of the same segment, and on the segments of two others. The segment is 2 for a token and 0 for the prompt and for
padding.

Legend: B batch, N tokens of the whole sequence, P tokens of the prompt, L = P + N, S of these on this rank, H heads, D
head dim, M features of the model, K biases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from ringspan.caching.registry import on_clear_caches
from ringspan.errors import UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.integrations.transformers.mask_functions import Sequence, by_rows
from ringspan.integrations.transformers.model_block import block_of_model, block_with_mask, refuse_cache, refuse_weights
from ringspan.integrations.transformers.model_call import documents_of_call
from ringspan.integrations.transformers.packing import refuse_documents
from ringspan.integrations.transformers.refusals import named_refusals, refuse_layer
from ringspan.layouts import Layout
from ringspan.masks import full


@dataclass(frozen=True)
class SegmentBias:
    """The bias of a pair of tokens: a row of ``bias_KH``.

    The first rows are those of the distances ``k - q`` from ``1 - L`` to ``L - 1``, by ``buckets``. After these
    ``count`` rows there is one for each pair of ``segments``.
    """

    bias_KH: Tensor
    segment_BL: Tensor
    buckets: Tensor
    count: int
    segments: int

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_q, of_k = self.segment_BL[b, q], self.segment_BL[b, k]
        by_distance = self.buckets[k - q + self.segment_BL.shape[1] - 1]
        by_segment = self.count + of_q * self.segments + of_k
        return score + self.bias_KH[torch.where(of_q == of_k, by_distance, by_segment), h]


@dataclass(frozen=True)
class Prompted:
    """The argument ``attention_mask`` of the layers in a block, in place of a mask tensor: the user's block, and one
    over the prompt and the sequence."""

    outer: ContextParallel
    block: ContextParallel


def cpmant_model(
    self: Any,
    original: Callable[..., Any],
    input_ids: Tensor,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = None,
    return_dict: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``CpmAntModel.forward``. In a block, the prompt is before the whole sequence. Nothing is cached then."""
    outer = block_of_model()
    if outer is None:
        given = (output_attentions, output_hidden_states, past_key_values, use_cache, return_dict)
        return original(self, input_ids, *given, **kwargs)
    with named_refusals(self, outer.refuse):
        refuse_weights("cpmant", output_attentions, self.config)
        refuse_cache(past_key_values)
        refuse_documents(documents_of_call(), outer.mask, "CPM-Ant")
        _refuse_mask(outer)
        ids_BL = _with_prompt(self, outer.unshard(input_ids.long(), dim=1))
        prompted, bias = _prompted(self, outer, ids_BL)
        mine_S = prompted.block.positions(device=input_ids.device)
    hidden_BSM = self.input_embedding(ids_BL[:, mine_S]) + self.segment_embedding(bias.segment_BL[:, mine_S])
    if output_hidden_states is None:
        output_hidden_states = self.config.output_hidden_states
    last, of_layers, _ = self.encoder(hidden_BSM, prompted, bias, False, output_hidden_states)
    rows = slice(int((mine_S < self.prompt_length).sum()), None)
    last, of_layers = last[:, rows], None if of_layers is None else tuple(x[:, rows] for x in of_layers)
    if return_dict if return_dict is not None else self.config.return_dict:
        return BaseModelOutputWithPast(last_hidden_state=last, hidden_states=of_layers)
    return (last,) if of_layers is None else (last, of_layers)


def cpmant_attention(
    self: Any,
    original: Callable[..., Any],
    hidden_q: Tensor,
    hidden_kv: Tensor,
    attention_mask: Any,
    position_bias: Any,
    *rest: Any,
) -> Any:
    """Run ``CpmAntAttention.forward``, in a block over all ranks."""
    if not isinstance(attention_mask, Prompted):
        return original(self, hidden_q, hidden_kv, attention_mask, position_bias, *rest)
    with named_refusals(self, attention_mask.outer.refuse):
        dropout = self.dropout.p if self.training and self.dropout is not None else 0.0
        refuse_layer(self, attention_mask.block.plan.q_layout.length, dropout, {})
        q_BHSD, k_BHSD, v_BHSD = (
            project(x).unflatten(-1, (self.num_heads, self.dim_head)).transpose(1, 2)
            for project, x in ((self.project_q, hidden_q), (self.project_k, hidden_kv), (self.project_v, hidden_kv))
        )
        attention_mask.outer.mark_as_used()
        out_BHSD: Any = attention_mask.block.flex_attention(q_BHSD, k_BHSD, v_BHSD, position_bias.score_mod)
    return self.attention_out(out_BHSD.transpose(1, 2).flatten(2)), None


def _with_prompt(model: Any, ids_BN: Tensor) -> Tensor:
    """Return ids (B, L) of the embedding of prompts and tokens."""
    prompt_P = torch.arange(model.prompt_length, device=ids_BN.device) + model.vocab_size + 2 * model.prompt_length
    return torch.cat([prompt_P.expand(len(ids_BN), -1), ids_BN], dim=1)


def _prompted(model: Any, outer: ContextParallel, ids_BL: Tensor) -> tuple[Prompted, SegmentBias]:
    made, count, length = model.position_bias, model.prompt_length, ids_BL.shape[1]
    is_token_BL = ids_BL.ne(0)
    is_token_BL[:, :count] = False
    tokens_B = is_token_BL.sum(dim=1)
    place_L = torch.arange(length, device=ids_BL.device)
    valid_BL = (place_L < count) | (length - place_L <= tokens_B[:, None])  # as many at the end as there are tokens
    mask = full(length)
    if not valid_BL.all():
        sees = lambda b, h, q, k: valid_BL[b, q] & valid_BL[b, k]  # noqa: E731
        mask = by_rows("padding", sees, (valid_BL,), Sequence(length, length))
    distances = torch.arange(1 - length, length, device=ids_BL.device, dtype=torch.int32)
    buckets = made._position_bucket(distances, num_buckets=made.num_buckets, max_distance=made.max_distance).long()
    bias = SegmentBias(made.relative_attention_bias, 2 * is_token_BL.long(), buckets, made.num_buckets, made.num_segments)
    return Prompted(outer, block_with_mask(_longer(outer, count), ("q", "kv"), mask)), bias


_longer_blocks: WeakKeyDictionary[ContextParallel, dict[int, ContextParallel]] = WeakKeyDictionary()
on_clear_caches(_longer_blocks.clear)


def _longer(outer: ContextParallel, count: int) -> ContextParallel:
    """Return a block over the user's sequence with ``count`` tokens before it, which are on the first rank."""
    known = _longer_blocks.setdefault(outer, {})
    if count not in known:
        layout = outer.plan.q_layout
        spans = [[(start + count, stop + count, step) for start, stop, step in of_rank] for of_rank in layout.spans]
        spans[0] = [(0, count, 1), *spans[0]] if count else spans[0]
        longer = Layout(spans, name=f"{count} tokens before {layout.name}")
        known[count] = outer.with_mask(full(layout.length + count), layout=longer)
    return known[count]


def _refuse_mask(outer: ContextParallel) -> None:
    n, mask = outer.plan.q_layout.length, outer.mask
    if mask.predicate is not None or mask.lengths != (n, n) or mask.area != n * n:
        raise UnplannedAttention(
            f"every token of cpmant sees all others, also those after it, and the block's mask is {mask.name}: give "
            "ContextParallel rs.full(length)"
        )
