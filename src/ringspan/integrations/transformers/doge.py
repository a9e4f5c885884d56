"""The attention of Doge: each key has a bias, which the layer computes from its value.

::

    scores = scale * q·k + bias_of_key            = scale * (q, 1 / scale)·(k, bias_of_key)

So the bias is one more feature of the key, and travels with it. Above ``keep_window_size`` tokens a query attends only
to the keys with the largest biases. These are chosen by the data, and such a sequence is refused.

Legend: B batch, G key heads, S queries, T keys of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.errors import UnplannedAttention
from ringspan.integrations.transformers.layer_mask import LayerMask
from ringspan.integrations.transformers.refusals import named_refusals

FEATURES = 8  # kernels want head dims that are multiples of it


@dataclass(frozen=True)
class KeyBias:
    """The mask of a layer, and a bias of each key. It stands for a mask tensor (B, G, S, T) plus the bias."""

    mask: LayerMask
    bias_BGT: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.bias_BGT.shape[:2], *self.mask.local_lengths))

    def __getitem__(self, _: Any) -> KeyBias:
        return self

    def expand(self, *_: Any) -> KeyBias:
        return self  # the layer repeats the heads of the keys; those of the bias are the same

    reshape = expand

    def folded(self, query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, S, D) and keys (B, G, T, D) with the bias as another feature."""
        rest = -(query.shape[-1] + 1) % FEATURES
        ones = torch.full_like(query[..., :1], 1 / scale)
        bias_BGT1 = self.bias_BGT[..., None].to(key.dtype)
        return tuple(F.pad(torch.cat(parts, dim=-1), (0, rest)) for parts in ((query, ones), (key, bias_BGT1)))  # type: ignore[return-value]


def doge_biases(
    self: Any,
    original: Callable[..., Any],
    hidden_states: Tensor,
    dt_states: Tensor,
    keep_window_size: int = 2048,
    attention_mask: Any = None,
) -> Any:
    """Run ``DogeAttention.prepare_dynamic_mask``. In a block, return the mask of the layer with the biases."""
    if not isinstance(attention_mask, LayerMask):
        return original(self, hidden_states, dt_states, keep_window_size, attention_mask)
    with named_refusals(self, attention_mask.refuse):
        if attention_mask.tokens > keep_window_size:
            raise UnplannedAttention(
                f"the sequence has {attention_mask.tokens} tokens, and above keep_window_size={keep_window_size} this layer "
                "chooses keys by their values. No rank has all of them"
            )
    return KeyBias(attention_mask, dt_states)
