"""Keys and values side by side in one row, copied in words.

Rows come from tensors in which a head's tokens lie together, not a token's heads, so that this is a copy of short pieces.
``torch.cat`` does it element by element. Sixteen bytes are as good an element as two, and there are eight times fewer of them.

Legend: T keys, B batch, G key heads, D head dim, E value dim.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import torch
from torch import Tensor

WORD = torch.complex128


def beside(k_TBGD: Tensor, v_TBGE: Tensor) -> Tensor:
    """``torch.cat([k, v], dim=-1)``, to the bit, row by row: rows travel as they lie."""
    parts = (k_TBGD, v_TBGE)
    if all(map(_is_in_words, parts)):
        return torch.cat([x.view(WORD) for x in parts], dim=-1).contiguous().view(k_TBGD.dtype)
    return torch.cat(parts, dim=-1).contiguous()  # it may have lain otherwise, if both parts did


def _is_in_words(x: Tensor) -> bool:
    """Whether every row consists of whole words, each where a word may lie, on a device that has such words."""
    if x.device.type not in ("cpu", "cuda"):
        return False
    *steps, last = x.stride()
    elements = WORD.itemsize // x.element_size()
    places = reduce(or_, (*steps, x.shape[-1], x.storage_offset()))  # a multiple of a power of two, if all of them are
    return last == 1 and places % elements == 0 and x.data_ptr() % WORD.itemsize == 0
