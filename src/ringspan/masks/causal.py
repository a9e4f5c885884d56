"""Causal masks: a query sees its own key and earlier ones."""

from __future__ import annotations

from typing import Literal

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.mask import Mask, length
from ringspan.masks.table import MAX_LENGTH

Align = Literal["start", "end"]


def causal(q_len: int | None = None, k_len: int | None = None, *, align: Align | None = None) -> Mask:
    """Make a mask in which query ``q`` sees keys ``k <= q``. With no length it is a relation, for use with another
    mask.

    If the numbers of queries and keys differ there are two conventions and no safe default, so ``align`` is required:
    ``"start"`` aligns the first query with the first key (PyTorch's ``is_causal``), ``"end"`` the last query with the
    last key (flash-attention's ``causal``; decoding with a cache).

    >>> print(causal(2, 4, align="end").ascii())
    x x x .
    x x x x
    """
    if q_len is None:
        if k_len is not None or align is not None:
            raise MaskError("causal() without q_len is a relation of any length: it takes no k_len and no align")
        return Mask(tables.table((0, MAX_LENGTH, 0, MAX_LENGTH, -MAX_LENGTH, 0)), None, None, name="causal()")
    q = length("q_len", q_len)
    k = q if k_len is None else length("k_len", k_len)
    offset = diagonal(q, k, align)
    name = f"causal({q})" if q == k else f'causal({q}, {k}, align="{align}")'
    return Mask(tables.table((0, q, 0, k, -MAX_LENGTH, offset)), q, k, name=name)


def diagonal(q_len: int, k_len: int, align: str | None) -> int:
    """Return the largest ``k - q`` that causality allows."""
    if align not in (None, "start", "end"):
        raise MaskError(f'align must be "start" or "end", not {align!r}')
    if align is None and q_len != k_len:
        raise MaskError(
            f'causal with {q_len} queries and {k_len} keys can mean two things: give align="start" (query i sees keys 0..i) '
            f'or align="end" (the last query sees all keys)'
        )
    return k_len - q_len if align == "end" else 0
