"""Chunked attention: the sequence is split into chunks of equal size that do not see each other."""

from __future__ import annotations

import numpy as np

from ringspan.errors import MaskError
from ringspan.masks.documents import documents
from ringspan.masks.mask import Mask, length
from ringspan.masks.table import check_count


def chunked(n: int, chunk: int, *, causal: bool = True) -> Mask:
    """Make a mask in which tokens see their own chunk of ``chunk`` tokens (the last may be shorter), causally unless
    ``causal=False``.

    >>> print(chunked(5, 2).ascii())
    x . . . .
    x x . . .
    . . x . .
    . . x x .
    . . . . x
    """
    n, size = length("n", n), length("chunk", chunk)
    if size == 0:
        raise MaskError("a chunk must hold at least one token, not 0")
    check_count(-(-n // size), f"chunked({n}, {size})")
    cuts = np.minimum(np.arange(0, n + size, size), n) if n else np.zeros(1, dtype=np.int64)
    of_documents = documents(np.diff(cuts), causal=causal)
    return Mask(of_documents.table, n, n, name=f"chunked({n}, {size}{'' if causal else ', causal=False'})")
