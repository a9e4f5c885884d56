"""Prefix-LM: all queries see the prefix, the rest is causal."""

from __future__ import annotations

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.mask import Mask, length
from ringspan.masks.table import MAX_LENGTH


def prefix(n: int, prefix: int) -> Mask:
    """Make a mask in which every query sees the first ``prefix`` of ``n`` tokens, itself and earlier tokens.

    >>> print(prefix(4, 2).ascii())
    x x . .
    x x . .
    x x x .
    x x x x
    """
    n, p = length("n", n), length("prefix", prefix)
    if p > n:
        raise MaskError(f"a prefix of {p} tokens is longer than the sequence of {n}")
    # Two bands: the square of the prefix with itself, and the causal rows below it.
    bands = tables.table((0, p, 0, p, -MAX_LENGTH, MAX_LENGTH), (p, n, 0, n, -MAX_LENGTH, 0))
    return Mask(bands, n, n, name=f"prefix({n}, {p})")
