"""The slopes of ALiBi biases, which layers add to their scores.

A model computes the biases of the keys that it gets, here those of one rank. Its slope says what the biases of all keys
are: a constant of a row does not change the softmax of the row.

Legend: B batch, H query heads, T keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def slope_of(bias: Tensor) -> Tensor | None:
    """Return the slope of a bias (..., 1, T) that is linear in the key, for each row of its leading dims, in float64.
    None if it is not linear.

    A bias may be rounded: Bloom computes it in the dtype of the model, Falcon always in bfloat16. So every value is
    right to half a unit in the last place, and a line fitted to all of them is nearer to the slope of the model than any
    two of them are. The kernel adds this line without rounding it. It differs from one process by the rounding of the
    biases there, and is nearer to a model in float32.

    >>> slope_of(torch.tensor([[[0.0, 0.5, 1.0]]])).item(), slope_of(torch.tensor([[[0.0, 0.5, 1.5]]]))
    (0.5, None)
    """
    count = bias.shape[-1]
    if count < 2:
        return None
    values = bias.squeeze(-2).double()
    values = values - values.mean(-1, keepdim=True)
    keys_T = torch.arange(count, device=bias.device).double() - (count - 1) / 2
    slope = (values * keys_T).sum(-1) / keys_T.square().sum()
    deviation = (values - slope[..., None] * keys_T).abs().amax(-1)
    tolerance = torch.finfo(_precision(bias)).eps * bias.abs().amax(-1).squeeze(-1).double()
    return None if (deviation > tolerance).any() else slope


def slope_of_rows(slope_BH: Tensor) -> Tensor | None:
    """Return the slope of each head. None if rows of the batch have different slopes.

    A row that has only padding on this rank has biases of 0, and no slope.
    """
    slopes = slope_BH[slope_BH.any(-1)]
    return slopes[0] if torch.allclose(slopes, slopes[:1].expand_as(slopes)) else None


def _precision(x: Tensor) -> torch.dtype:
    """Return the first of these dtypes that has all values of ``x``: they may have been rounded to it."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return next((dtype for dtype in dtypes if torch.equal(x.to(dtype).to(x.dtype), x)), x.dtype)
