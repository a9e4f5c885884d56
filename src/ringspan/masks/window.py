"""Sliding windows: a query sees the keys near it."""

from __future__ import annotations

from typing import Any

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.mask import Mask, length
from ringspan.masks.table import MAX_LENGTH


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Make a mask in which query ``q`` sees keys from ``q - left`` to ``q + right``, both included; None means no limit
    on that side.

    A relation: it holds at any length and takes the lengths of the mask it is combined with. ``left`` is the number of
    keys *before* the query, as in flash attention. A configuration of transformers that says ``sliding_window=W``
    counts the query's own key as well: that is :func:`sliding_window`.

    >>> from ringspan import full
    >>> print((full(4) & window(left=1, right=0)).ascii())
    x . . .
    x x . .
    . x x .
    . . x x
    """
    if left is None and right is None:
        raise MaskError("window() needs left= or right=: without either it would hide nothing")
    lo = -MAX_LENGTH if left is None else -_reach("left", left)
    hi = MAX_LENGTH if right is None else _reach("right", right)
    sides = ", ".join(f"{side}={n}" for side, n in (("left", left), ("right", right)) if n is not None)
    return Mask(tables.table((0, MAX_LENGTH, 0, MAX_LENGTH, lo, hi)), None, None, name=f"window({sides})")


def sliding_window(size: int) -> Mask:
    """Make a mask in which a query sees ``size`` keys: its own and the ``size - 1`` before it.

    This is what ``sliding_window=size`` means in a configuration of transformers. It equals
    ``window(left=size - 1, right=0)``, which counts the keys before the query.

    >>> from ringspan import full
    >>> full(9) & sliding_window(4) == full(9) & window(left=3, right=0)
    True
    """
    size = length("the size of the sliding window", size)
    if size < 1:
        raise MaskError("a sliding window of 0 keys hides everything: the size counts the query's own key")
    mask = window(left=size - 1, right=0)
    return Mask(mask.table, None, None, name=f"sliding_window({size})")


def _reach(side: str, value: Any) -> int:
    return length(f"window's {side}", value)
