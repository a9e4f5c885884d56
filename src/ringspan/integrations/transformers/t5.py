"""The attention of T5 and its relatives, whose scores have a learned bias for each head and distance.

In one process a layer makes the biases (1, H, S, S) of all pairs. Here it makes those of one query for keys at all
distances, and a ``score_mod`` adds them::

    distance k - q          -2   -1    0    1    2          for 3 tokens
    biases of a head       [b0   b1   b2   b3   b4]         bias[q, k] = biases[k - q + 2]

The later layers of T5 get the biases of the first, as a tensor, so that checkpoints around layers see it. Layers without
biases, as those of cross-attention, make zeros (1, H, S, T).

Legend: H heads, S queries, T keys, W distances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ringspan.frontends.context_parallel import ContextParallel
from ringspan.integrations.transformers.model_block import block_of_model
from ringspan.integrations.transformers.refusals import HAS_BIASES
from ringspan.kernels import ScoreMod


def biases_of_distances(self: Any, original: Callable[..., Any], query_length: int, key_length: int, **kwargs: Any) -> Any:
    """Run ``T5Attention.compute_bias``. In a block, it computes the biases of one query for keys at all distances:
    (1, H, 1, W)."""
    block = block_of_model()
    if block is None:
        return original(self, query_length, key_length, **kwargs)
    longest = _longest(block)
    return original(self, 1, 2 * longest - 1, **{**kwargs, "past_seen_tokens": longest - 1})


def has_distance_biases(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a layer passes biases of distances, or zeros in place of them, to attention."""
    config = getattr(module, "config", None)
    return getattr(config, "model_type", None) in HAS_BIASES and isinstance(kwargs.get("position_bias"), Tensor)


def distance_bias(biases: Tensor, block: ContextParallel) -> ScoreMod | None:
    """Return the function that adds the biases of distances to scores. None for zeros (1, H, S, T)."""
    longest = _longest(block)
    if biases.shape[2:] != (1, 2 * longest - 1):
        return None
    biases_HW = biases[0, :, 0]

    def add_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + biases_HW[h, k - q + longest - 1]

    return add_bias


def _longest(block: ContextParallel) -> int:
    return max(block.plan.q_layout.length, block.plan.kv_layout.length)
