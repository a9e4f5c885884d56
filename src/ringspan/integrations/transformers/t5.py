"""The attention of T5 and its relatives, whose scores have a learned bias for each head and distance.

In one process a layer makes the biases (1, H, S, S) of all pairs. Here it makes those of all distances, and a
``score_mod`` adds them::

    distance k - q          -2   -1    0    1    2          for 3 tokens
    biases of a head       [b0   b1   b2   b3   b4]         bias[q, k] = biases[k - q + 2]

The later layers of T5 get the biases of the first. Cross-attention has none: its layers make zeros (1, H, S, T).

Legend: H heads, S queries, T keys, W distances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ringspan.integrations.transformers.model_block import block_of_model


@dataclass(frozen=True)
class DistanceBias:
    """What the layers have in place of biases (1, H, S, T). ``first`` is the first distance k - q of ``biases_HW``."""

    biases_HW: Tensor
    first: int

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.biases_HW[h, k - q - self.first]


def biases_of_distances(self: Any, original: Callable[..., Any], query_length: int, key_length: int, **kwargs: Any) -> Any:
    """Run ``T5Attention.compute_bias``. In a block, it computes the biases of one query for the keys at all distances."""
    block = block_of_model()
    if block is None:
        return original(self, query_length, key_length, **kwargs)
    longest = max(block.plan.q_layout.length, block.plan.kv_layout.length)
    biases_1H1W = original(self, 1, 2 * longest - 1, **{**kwargs, "past_seen_tokens": longest - 1})
    return DistanceBias(biases_1H1W[0, :, 0], 1 - longest)


def is_no_bias(module: nn.Module, position_bias: Any) -> bool:
    """Return whether a layer passes zeros as the biases of its scores, since it has none."""
    has_none = getattr(module, "has_relative_attention_bias", True) is False
    return has_none and isinstance(position_bias, Tensor) and not position_bias.any()
