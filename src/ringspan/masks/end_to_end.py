"""Several sequences laid end to end as one, in which no sequence sees another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringspan.errors import MaskError
from ringspan.masks.mask import Mask
from ringspan.masks.table import EMPTY, HI, K0, K1, LO, Q0, Q1, Table


def end_to_end(masks: Sequence[Mask], name: str) -> Mask:
    """Return the mask of the sequences laid end to end.

    >>> from ringspan import causal, full
    >>> print(end_to_end([causal(2), full(1, 2)], "both").dense().astype(int))
    [[1 0 0 0]
     [1 1 0 0]
     [0 0 1 1]]
    """
    for i, mask in enumerate(masks):
        if mask.predicate is not None:
            raise MaskError(f"mask {i} of {name}, {mask.name}, is defined by a function: only masks of bands can be joined")
    table = bands_end_to_end(masks)
    return Mask(table, sum(mask.lengths[0] for mask in masks), sum(mask.lengths[1] for mask in masks), name=name)


def bands_end_to_end(masks: Sequence[Mask]) -> Table:
    """Return the bands of all masks, in the tokens of the sequences laid end to end."""
    parts, q, k = [EMPTY], 0, 0
    for mask in masks:
        parts.append(mask.table + shift(q, k))
        q, k = q + mask.lengths[0], k + mask.lengths[1]
    return np.concatenate(parts)


def shift(queries: int, keys: int) -> Table:
    """Return what to add to a band to move it by this many queries and keys."""
    row = np.zeros(6, dtype=np.int64)
    row[[Q0, Q1]], row[[K0, K1]], row[[LO, HI]] = queries, keys, keys - queries
    return row
