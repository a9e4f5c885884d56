"""Full masks: every query sees every key."""

from __future__ import annotations

from ringspan.masks import table as tables
from ringspan.masks.mask import Mask, length
from ringspan.masks.table import MAX_LENGTH


def full(q_len: int, k_len: int | None = None) -> Mask:
    """Make a mask in which all of ``q_len`` queries see all of ``k_len`` keys (as many as queries by default).

    >>> print(full(2, 3).ascii())
    x x x
    x x x
    """
    q = length("q_len", q_len)
    k = q if k_len is None else length("k_len", k_len)
    name = f"full({q})" if k_len is None else f"full({q}, {k})"
    return Mask(tables.table((0, q, 0, k, -MAX_LENGTH, MAX_LENGTH)), q, k, name=name)
