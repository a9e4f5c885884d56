"""``nn.MultiheadAttention`` inside a block: its projections on this rank's tokens, around the attention of the block.

PyTorch disables a mode while it handles a function, and ``nn.MultiheadAttention`` calls its attention inside such a
function, ``F.multi_head_attention_forward``. So the block computes this function itself. While a block is open PyTorch
does not use the fused kernels that it has for evaluation.

Legend: S queries, T keys, B batch, M model dim, H heads, D head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from ringspan.errors import UnplannedAttention


class AttentionFunction(Protocol):
    """``F.scaled_dot_product_attention``."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, /, *, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
    ) -> Tensor: ...


def multi_head_attention(
    attend: AttentionFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """Compute ``F.multi_head_attention_forward`` with ``attend`` for its attention. Tensors are (S, B, M) or (S, M)."""
    _refuse_if(need_weights, "need_weights=True (the default) asks for the weights of all pairs. Pass need_weights=False")
    _refuse_if(key_padding_mask is not None, "it has a key_padding_mask. Give the mask of the whole sequence to the block")
    _refuse_if(bias_k is not None or bias_v is not None or add_zero_attn, "add_bias_kv and add_zero_attn add keys on each rank")
    _refuse_if(static_k is not None or static_v is not None, "it has static keys or values")
    if query is key and key is value and not use_separate_proj_weight:
        projected = list(_linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1))
    else:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else _thirds(in_proj_weight)
        inputs = zip((query, key, value), weights, _thirds(in_proj_bias), strict=True)
        projected = [_linear(x, weight, bias) for x, weight, bias in inputs]
    q_BHSD, k_BHTD, v_BHTD = (_heads(x, num_heads) for x in projected)
    # As in PyTorch, is_causal=True says what attn_mask is.
    out_BHSD = attend(
        q_BHSD,
        k_BHTD,
        v_BHTD,
        attn_mask=None if is_causal else attn_mask,
        dropout_p=dropout_p if training else 0.0,
        is_causal=is_causal,
    )
    out_SBM = _linear(out_BHSD.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return out_SBM if query.ndim == 3 else out_SBM.squeeze(1), None


def _heads(x_SBM: Tensor, heads: int) -> Tensor:
    """Reshape (S, B, M) or (S, M) to (B, H, S, D)."""
    if x_SBM.ndim == 2:
        x_SBM = x_SBM.unsqueeze(1)
    return x_SBM.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _thirds(x: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the parts of a parameter for q, k and v."""
    return (None, None, None) if x is None else x.chunk(3)


def _linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None  # nn.MultiheadAttention has either one weight for q, k and v or one for each
    return F.linear(x, weight, bias)


def _refuse_if(condition: bool, reason: str) -> None:
    if condition:
        raise UnplannedAttention(f"MultiheadAttention cannot be split over ranks here: {reason}")
