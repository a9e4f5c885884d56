"""The attention of Inkling, whose scores have a bias that each query computes for each distance.

In one process a layer makes the biases of all pairs. Here the states that they are made from are gathered, d_rel numbers
for each token and head, and a ``score_mod`` computes the bias of a pair::

    bias[q, k] = relative[q] · profiles[:, q - k]        for 0 <= q - k < rel_extent, else 0

Legend: B batch, S tokens of this rank, N tokens of the whole sequence, H heads, R numbers of a token (d_rel), E distances
(rel_extent).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.errors import UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.current_block import current_block
from ringspan.frontends.recompute import entered_blocks, keep_blocks, was_absent_in_forward
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
    block = current_block()
    if block is None or was_absent_in_forward(block):
        return original(self, relative_BSHR, *positions)
    keep_blocks(entered_blocks())
    return RelativeBias(block.unshard(relative_BSHR, dim=1, grad="partial"), self.proj)


def inkling_attention(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``InklingAttention.forward``. In a block, raise if it scales queries by their position on this rank."""
    block = current_block()
    if block is not None and not was_absent_in_forward(block):
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
