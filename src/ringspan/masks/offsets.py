"""Masks of fixed offsets: a query sees the tokens of its own document from ``first`` to ``last`` positions further.

A layer that mixes neighbouring tokens (a shift, a causal convolution) needs the rows of this mask, so it is planned
like attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.mask import Mask
from ringspan.masks.mask import lengths as as_lengths


def offsets(lengths: Any, first: int, last: int) -> Mask:
    """Make the mask in which token ``t`` sees the tokens ``t + first`` to ``t + last`` of its own document.

    >>> print(offsets([3, 2], 1, 1).ascii())
    . x . . .
    . . x . .
    . . . . .
    . . . . x
    . . . . .
    """
    if first > last:
        raise MaskError(f"the first offset must not be after the last; got {first} and {last}")
    size = as_lengths("lengths", lengths)
    stop = np.cumsum(size)
    start = stop - size
    bands = np.stack([start, stop, start, stop, np.full_like(start, first), np.full_like(start, last)], axis=1)
    n = int(size.sum())
    name = f"offsets({first}…{last}, {len(size)} document{'s' * (len(size) != 1)} over {n} tokens)"
    return Mask(tables.tighten(bands), n, n, name=name)
