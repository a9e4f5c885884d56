"""The attention of Inkling and Inkling 2, whose scores have a bias that each query computes for each distance.

In one process a layer makes the biases of all pairs. Here the states that they are made from are gathered, d_rel numbers
for each token and head, and a ``score_mod`` computes the bias of a pair::

    bias[q, k] = relative[q] · profiles[:, q - k]        for 0 <= q - k < rel_extent, else 0

Inkling 2 has in addition convolutions whose weights each token computes, and attention over the layers of one token,
which is not part of the sequence.

Legend: B batch, S tokens of this rank, N tokens of the whole sequence, H heads, R numbers of a token (d_rel), E distances
(rel_extent), F features, D features of a head, K width of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.errors import UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.local_attention import local_attention
from ringspan.integrations.transformers.convolutions import document_lengths, refuse_padding
from ringspan.integrations.transformers.model_block import block_of_model
from ringspan.integrations.transformers.refusals import named_refusals


@dataclass(frozen=True)
class RelativeBias:
    """What a layer has in place of a bias (B, H, S, S)."""

    relative_BNHR: Tensor
    profiles_RE: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.relative_BNHR.dtype

    def float(self) -> RelativeBias:
        return self

    def to(self, *_: Any) -> RelativeBias:
        return self

    def __mul__(self, _: Tensor) -> RelativeBias:
        return self  # by ones: see inkling_attention

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        states, profiles = self.relative_BNHR, self.profiles_RE
        count, extent = profiles.shape
        distance = q - k
        at = distance.clamp(0, extent - 1)
        bias = states[b, q, h, 0] * profiles[0, at]
        for r in range(1, count):
            bias = bias + states[b, q, h, r] * profiles[r, at]
        return score + torch.where((distance >= 0) & (distance < extent), bias, 0.0)


def inkling_bias(self: Any, original: Callable[..., Any], relative_BSHR: Tensor, *positions: Tensor) -> Any:
    """Run ``InklingRelativeLogits.forward``. In a block, the bias is computed from the states of all tokens."""
    block = block_of_model()
    if block is None:
        return original(self, relative_BSHR, *positions)
    return RelativeBias(block.unshard(relative_BSHR, dim=1, grad="partial"), self.proj)


def inkling_attention(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``InklingAttention.forward``. In a block, raise if it scales queries by their position on this rank."""
    block = block_of_model()
    if block is not None:
        with named_refusals(self, block.refuse):
            _refuse_scaling(self, block)
    return original(self, *args, **kwargs)


def _refuse_scaling(layer: Any, block: ContextParallel) -> None:
    limit, tokens = layer.config.log_scaling_n_floor, block.plan.q_layout.length
    if not layer.is_sliding and limit is not None and tokens > limit:
        raise UnplannedAttention(
            f"this layer scales queries by their position (log_scaling_n_floor), and counts positions in the tokens of this "
            f"rank. This is exact up to {limit} tokens; the sequence has {tokens}"
        )


def inkling_convolution(
    self: Any,
    original: Callable[..., Any],
    hidden_BSF: Tensor,
    of_weights_BSF: Tensor,
    past_key_values: Any = None,
    conv_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``Inkling2DynamicShortConvolution.forward``. In a block, the tokens before a token are those of the sequence."""
    block = block_of_model()
    if block is None:
        return original(self, hidden_BSF, of_weights_BSF, past_key_values, conv_mask, **kwargs)
    with named_refusals(self, block.refuse):
        refuse_padding(conv_mask)
        heads, width, states_BSF = self.num_heads, self.conv_kernel_size, hidden_BSF.float()
        documents = document_lengths(block, kwargs.get("cu_seq_lens_q"))
        window_BSKF = block.halo(states_BSF, before=width - 1, dim=1, documents=documents)
        of_token_BSHK = self.weight_proj(of_weights_BSF).float().unflatten(-1, (heads, width))
        of_layer_KHD = self.static_weight.float().unflatten(-1, (heads, -1))
        # the first weight is that of the token itself, which is the last of its window
        window_BSKHD = window_BSKF.flip(2).unflatten(-1, (heads, -1))
        out_BSHD = torch.einsum("bskhd,khd->bshd", window_BSKHD, of_layer_KHD)
        out_BSHD = out_BSHD + torch.einsum("bskhd,bshk->bshd", window_BSKHD, of_token_BSHK)
        return ((out_BSHD.flatten(2) + states_BSF) / math.sqrt(2 * width + 1)).to(hidden_BSF.dtype)


def inkling_residual(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``Inkling2BlockAttentionResidual.forward``, in which each token attends to its own states in other layers."""
    if block_of_model() is None:
        return original(self, *args, **kwargs)
    with local_attention():
        return original(self, *args, **kwargs)
