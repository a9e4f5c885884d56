"""Checks of q, k and v.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.errors import InputError
from ringspan.plans import Shape
from ringspan.plans.shape import ITEM_BYTES

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in ITEM_BYTES}


def shape_of(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor) -> Shape:
    """Return the shape of a call. Raise :class:`InputError` if q, k and v do not fit each other."""
    for name, x in (("q", q_BHSD), ("k", k_BGTD), ("v", v_BGTE)):
        if x.is_nested:
            raise InputError(
                f"{name} is a nested tensor: make one sequence of its parts, x.values(), with rs.documents(lengths) as the mask"
            )
        if len(x.shape) != 4:
            raise InputError(f"{name} must be (batch, heads, tokens, dim); got {tuple(x.shape)}")
        if x.dtype != q_BHSD.dtype or x.device != q_BHSD.device:
            raise InputError(
                f"q, k and v must have one dtype and device; q is {q_BHSD.dtype} on {q_BHSD.device}, "
                f"{name} is {x.dtype} on {x.device}"
            )
    if q_BHSD.dtype not in DTYPES:
        raise InputError(f"attention is computed in {', '.join(DTYPES.values())}; got {q_BHSD.dtype}")
    (b, h, _, d), (kb, g, t, kd), (vb, vg, vt, e) = q_BHSD.shape, k_BGTD.shape, v_BGTE.shape
    shapes = f"q {tuple(q_BHSD.shape)}, k {tuple(k_BGTD.shape)}, v {tuple(v_BGTE.shape)}"
    if not b == kb == vb:
        raise InputError(f"q, k and v must have one batch size: {shapes}")
    if (g, t) != (vg, vt):
        raise InputError(f"k and v must have as many heads and tokens as each other: {shapes}")
    if d != kd:
        raise InputError(f"q and k must have one head dim: {shapes}")
    if d == 0 or e == 0:
        raise InputError(f"heads must be at least 1 wide: {shapes}")
    if g == 0 or h % g:
        raise InputError(
            f"{h} query heads cannot share {g} key heads evenly; the number of query heads must be a multiple: {shapes}"
        )
    return Shape(batch=b, heads=h, kv_heads=g, head_dim=d, v_dim=e, dtype=DTYPES[q_BHSD.dtype])
