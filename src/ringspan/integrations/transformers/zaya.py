"""The projections of ZAYA, which mix each token with the tokens before it.

Queries and keys go through two short causal convolutions, and one half of a value is that of the token before. Some of
these tokens are on other ranks. ``cp.halo`` and ``cp.roll`` bring them together; they do not cross documents of the
block's mask.

Legend: B batch, S tokens of this rank, F features, C channels of queries and keys, W width of both convolutions, H
heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringspan.frontends.context_parallel import ContextParallel
from ringspan.integrations.transformers.convolutions import document_lengths, refuse_padding
from ringspan.integrations.transformers.model_block import block_of_model
from ringspan.integrations.transformers.refusals import named_refusals


def zaya_projections(
    self: Any, original: Callable[..., Any], hidden_BSF: Tensor, past_key_values: Any, conv_mask: Tensor | None = None
) -> Any:
    """Run ``ZayaCCAProjection.forward``. In a block, the tokens before a token are those of the whole sequence."""
    block = block_of_model()
    if block is None:
        return original(self, hidden_BSF, past_key_values, conv_mask)
    with named_refusals(self, block.refuse):
        refuse_padding(conv_mask)
        return _project(self, hidden_BSF, block)


def _project(layer: Any, hidden_BSF: Tensor, block: ContextParallel) -> tuple[Tensor, Tensor, Tensor]:
    documents = document_lengths(block, None)
    shape = (*hidden_BSF.shape[:-1], -1, layer.head_dim)
    q_BSC, k_BSC = layer.q_proj(hidden_BSF), layer.k_proj(hidden_BSF)
    k_BSHD = k_BSC.view(shape).repeat_interleave(layer.num_key_value_groups, dim=2)
    rest_of_q_BSHD = (q_BSC.view(shape) + k_BSHD) * 0.5
    rest_of_k_BSHD = rest_of_q_BSHD.unflatten(2, (-1, layer.num_key_value_groups)).mean(dim=3)

    # One window for each token. The first convolution sees zeros before a document, as in one process.
    both_BSC = torch.cat([q_BSC, k_BSC], dim=-1)
    window_BSWC = block.halo(both_BSC, before=layer.conv_kernel_size, dim=1, documents=documents)
    mixed = layer.conv_qk_grouped(layer.conv_qk_depthwise(window_BSWC.flatten(0, 1).transpose(1, 2)))
    mixed_BSC = mixed.view(both_BSC.shape)
    q_BSHD = mixed_BSC[..., : q_BSC.shape[-1]].reshape(shape) + rest_of_q_BSHD
    k_BSHD = mixed_BSC[..., q_BSC.shape[-1] :].reshape(shape) + rest_of_k_BSHD

    before_BSF = block.roll(hidden_BSF, 1, dim=1, documents=documents)
    v_BSC = torch.cat([layer.v_proj_current(hidden_BSF), layer.v_proj_delayed(before_BSF)], dim=-1)
    return q_BSHD, k_BSHD, v_BSC.view(shape)
