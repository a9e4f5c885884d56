"""A predicate: functions that say, pair by pair, what is seen within the bands of a mask.

A mask that is no small set of bands (per batch, per head, or ragged everywhere) keeps bands around its blocks, by which it is
planned: what they do not hold is never computed or exchanged. Within them kernels call the functions, with global indices::

    bands, by blocks of 2      b, h, q, k -> (q + k) % 3 == 0      the mask
    x x . .                    x . . x                             x . . .
    x x . .                    . . x .                             . . . .
    x x x x                    . x . .                             . x . .
    x x x x                    x . . x                             x . . x
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ringspan.errors import MaskError
from ringspan.torch_private.tensor_version import tensor_version

# (b, h, q, k) -> bool, of one pair
MaskMod = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicate:
    """A pair is seen if all functions say so. ``batch`` and ``heads`` are how many they tell apart, None if they do not.

    ``fingerprint`` follows from what they say of every pair, and so is the same on all ranks. ``captured`` are the tensors
    they use and the state in which these were.
    """

    functions: tuple[MaskMod, ...]
    fingerprint: str
    batch: int | None = None
    heads: int | None = None
    captured: tuple[tuple[Any, int], ...] = ()

    @property
    def mask_mod(self) -> MaskMod:
        """All functions as one."""
        first, *others = self.functions
        if not others:
            return first

        def all_of_them(b: Any, h: Any, q: Any, k: Any) -> Any:
            seen = first(b, h, q, k)
            for other in others:
                seen = seen & other(b, h, q, k)
            return seen

        return all_of_them

    @property
    def transposed(self) -> Predicate:
        function = self.mask_mod
        return replace(self, functions=(lambda b, h, q, k: function(b, h, k, q),), fingerprint=f"{self.fingerprint}.T")

    def both(self, other: Predicate) -> Predicate:
        """What this one and the other show."""
        return Predicate(
            functions=(*self.functions, *other.functions),
            fingerprint=hashlib.sha256(f"{self.fingerprint} & {other.fingerprint}".encode()).hexdigest(),
            batch=_common("batch", self.batch, other.batch),
            heads=_common("heads", self.heads, other.heads),
            captured=(*self.captured, *other.captured),
        )

    @property
    def is_stale(self) -> bool:
        """Whether a tensor that the functions use has been changed in place since the mask was made of it."""
        return any(tensor_version(tensor) != version for tensor, version in self.captured)


def _common(what: str, a: int | None, b: int | None) -> int | None:
    if a is not None and b is not None and a != b:
        raise MaskError(f"one mask is for {what}={a}, the other for {what}={b}: make both for the same tensors")
    return b if a is None else a
