"""The slopes of ALiBi biases, which layers add to their scores.

A model computes the biases of the keys that it gets, here those of one rank, and counts the tokens that are no padding::

    2 ranks, 8 tokens, 3 of padding on the left     rank 0: keys 0 1 2 3     rank 1: keys 4 5 6 7
    biases for a slope of 0.5                               . . . 0                  0 .5 1 1.5

The slope says what the biases of all keys are: a constant of a row does not change the softmax of the row.

Legend: B batch, H query heads, T keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.errors import UnplannedAttention


def slope_of(bias_BHT: Tensor, valid_BT: Tensor | None = None) -> Tensor | None:
    """Return the slope of each head (H) in float64, where a bias is linear in the key. None if it is not.

    ``valid_BT`` are the keys that are no padding; None for all. Those of a row must be neighbours. The rows of the batch
    have one slope, and an offset each.

    A bias may be rounded: Bloom computes it in the dtype of the model, Falcon always in bfloat16. So every value is
    right to half a unit in the last place, and a line fitted to all of them is nearer to the slope of the model than any
    two of them are. The kernel adds this line without rounding it. It differs from one process by the rounding of the
    biases there, and is nearer to a model in float32.

    >>> slope_of(torch.tensor([[[0.0, 0.5, 1.0]]])).item(), slope_of(torch.tensor([[[0.0, 0.5, 1.5]]]))
    (0.5, None)
    >>> slope_of(torch.tensor([[[0.0, 0.0, 0.5, 1.0]]]), torch.tensor([[False, True, True, True]])).item()
    0.5
    """
    keys = torch.arange(bias_BHT.shape[-1], device=bias_BHT.device).double()
    if valid_BT is None:
        valid_BT = torch.ones(1, len(keys), dtype=torch.bool, device=bias_BHT.device)
    valid_B1T = valid_BT[:, None]
    if not (valid_B1T.sum(-1) > 1).any():
        raise no_slope()
    values_BHT, keys_B1T = _centred(bias_BHT.double(), valid_B1T), _centred(keys, valid_B1T)
    slope_H = (values_BHT * keys_B1T).sum((0, 2)) / keys_B1T.expand_as(values_BHT[:, :1]).square().sum()
    deviation_BH = (values_BHT - slope_H[:, None] * keys_B1T).abs().amax(-1)
    size_BH = (bias_BHT.double() * valid_B1T).abs().amax(-1)
    return None if (deviation_BH > torch.finfo(_precision(bias_BHT)).eps * size_BH).any() else slope_H


def no_slope() -> UnplannedAttention:
    return UnplannedAttention(
        "this layer has ALiBi biases, but this rank has only padding or a single token, whose biases are 0 for any slope. Pass "
        "the attention_mask of the whole sequence, or give every rank several tokens that are no padding"
    )


def _centred(x: Tensor, valid: Tensor) -> Tensor:
    """Return the differences of the last dim to its mean over valid keys. 0 for all others."""
    mean = (x * valid).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    return (x - mean) * valid


def _precision(x: Tensor) -> torch.dtype:
    """Return the first of these dtypes that has all values of ``x``: they may have been rounded to it."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return next((dtype for dtype in dtypes if torch.equal(x.to(dtype).to(x.dtype), x)), x.dtype)
