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

    A relation: it holds at any length and takes the lengths of the mask it is combined with.

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


def _reach(side: str, value: Any) -> int:
    return length(f"window's {side}", value)
