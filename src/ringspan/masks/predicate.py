"""A predicate: functions that decide which pairs within the bands of a mask are visible.

A mask that is not a small set of bands (it depends on the batch or the head, or is irregular) has bands around its
blocks, and a predicate. It is planned by its bands: pairs outside of them are never computed, and their keys are not
exchanged. Inside of them, kernels call the functions with global indices::

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
    """A pair is visible if all functions return True for it.

    ``batch`` and ``heads`` are the sizes that the functions distinguish, or None if they ignore the index.
    ``fingerprint`` is equal on all ranks that make the predicate from the same arguments; predicates of equal masks may
    have different ones. ``captured`` are the tensors they use, each with its version counter.
    """

    functions: tuple[MaskMod, ...]
    fingerprint: str
    batch: int | None = None
    heads: int | None = None
    captured: tuple[tuple[Any, int], ...] = ()

    @property
    def mask_mod(self) -> MaskMod:
        """The conjunction of all functions, as one function."""
        first, *others = self.functions
        if not others:
            return first

        def conjunction(b: Any, h: Any, q: Any, k: Any) -> Any:
            seen = first(b, h, q, k)
            for other in others:
                seen = seen & other(b, h, q, k)
            return seen

        return conjunction

    @property
    def transposed(self) -> Predicate:
        function = self.mask_mod
        return replace(self, functions=(lambda b, h, q, k: function(b, h, k, q),), fingerprint=f"{self.fingerprint}.T")

    def both(self, other: Predicate) -> Predicate:
        """Return the conjunction of this predicate and another."""
        return Predicate(
            functions=(*self.functions, *other.functions),
            fingerprint=hashlib.sha256(f"{self.fingerprint} & {other.fingerprint}".encode()).hexdigest(),
            batch=_common("batch", self.batch, other.batch),
            heads=_common("heads", self.heads, other.heads),
            captured=(*self.captured, *other.captured),
        )

    @property
    def is_stale(self) -> bool:
        """Whether a captured tensor was changed in place since the mask was made."""
        return any(tensor_version(tensor) != version for tensor, version in self.captured)


def _common(what: str, a: int | None, b: int | None) -> int | None:
    if a is not None and b is not None and a != b:
        raise MaskError(f"one mask is for {what}={a}, the other for {what}={b}: make both for the same tensors")
    return b if a is None else a
