"""Masks that differ between the rows of a batch, as one mask of bands.

The rows are laid end to end as one sequence, and each row sees only itself::

    per_row([documents([1, 2]), causal(3)])          x . .|. . .
                                                     . x .|. . .     row 0
    a batch of 2 rows of 3 tokens                    . x x|. . .
                                                     -----+-----
                                                     . . .|x . .
                                                     . . .|x x .     row 1
                                                     . . .|x x x

Planning, layouts, strategies and kernels treat it like packed documents. Only the front ends know that the tensors have
a batch dim: they lay the rows end to end.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ringspan.errors import MaskError
from ringspan.masks.end_to_end import bands_end_to_end
from ringspan.masks.mask import Mask


class BatchMask(Mask):
    """A mask for each row of a batch, all of one length. As a mask it is that of the rows laid end to end.

    Make one with :func:`per_row` or ``documents([[…], […]])``. ``& | - ~`` are those of the rows, with one mask for all
    rows or with another BatchMask.
    """

    __slots__ = ("rows",)

    rows: tuple[Mask, ...]

    def __init__(self, rows: Sequence[Mask], *, name: str) -> None:
        for i, row in enumerate(rows):
            if row.predicate is not None:
                raise MaskError(f"row {i} of {name} is defined by a function: give one mask_mod(b, h, q, k) of the whole batch")
        q_len, k_len = rows[0].lengths
        super().__init__(bands_end_to_end(rows), len(rows) * q_len, len(rows) * k_len, name=name)
        object.__setattr__(self, "rows", tuple(rows))

    @property
    def row_lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys of one row."""
        return self.rows[0].lengths

    @property
    def digest(self) -> str:
        """Sixteen hex digits, other than those of the same bands in one sequence."""
        try:
            return self._digest
        except AttributeError:
            text = ",".join(row.digest for row in self.rows)
            object.__setattr__(self, "_digest", hashlib.sha256(f"rows {text}".encode()).hexdigest()[:16])
            return self._digest

    def __eq__(self, other: object) -> bool:
        """Return whether the other is a batch with equal rows."""
        return self.rows == other.rows if isinstance(other, BatchMask) else False

    __hash__ = Mask.__hash__

    @property
    def is_causal(self) -> bool:
        return all(row.is_causal for row in self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.rows, self.name)

    def __and__(self, other: Mask) -> Mask:
        return self._by_row(operator.and_, other, "&")

    def __rand__(self, other: Mask) -> Mask:
        return self & other

    def __or__(self, other: Mask) -> Mask:
        return self._by_row(operator.or_, other, "|")

    def __ror__(self, other: Mask) -> Mask:
        return self | other

    def __sub__(self, other: Mask) -> Mask:
        return self._by_row(operator.sub, other, "-")

    def __rsub__(self, other: Mask) -> Mask:
        return BatchMask([other - row for row in self.rows], name=f"{other.name} - ({self.name})")

    def __invert__(self) -> Mask:
        return BatchMask([~row for row in self.rows], name=f"~({self.name})")

    @property
    def transposed(self) -> Mask:
        return BatchMask([row.transposed for row in self.rows], name=f"({self.name}).transposed")

    def _by_row(self, function: Callable[[Mask, Mask], Mask], other: Mask, sign: str) -> Mask:
        others = other.rows if isinstance(other, BatchMask) else (other,) * len(self.rows)
        if len(others) != len(self.rows):
            raise MaskError(f"{self.name} {sign} {other.name}: the batches have {len(self.rows)} and {len(others)} rows")
        made = [function(a, b) for a, b in zip(self.rows, others, strict=True)]
        return BatchMask(made, name=f"{self.name} {sign} {getattr(other, 'name', other)}")


def per_row(masks: Sequence[Mask]) -> BatchMask:
    """Make the mask of a batch from the masks of its rows, which have one length.

    >>> from ringspan import causal, documents
    >>> per_row([documents([1, 2]), causal(3)])
    <Mask per_row(2 rows of 3 tokens): 6 × 6, area 10, 3 bands>
    """
    rows = list(masks)
    if not rows:
        raise MaskError("per_row() takes the mask of each row of a batch; got none")
    for i, row in enumerate(rows):
        if not isinstance(row, Mask) or isinstance(row, BatchMask):
            raise MaskError(f"per_row() takes one mask for each row; masks[{i}] is {type(row).__name__}")
        if row.lengths != rows[0].lengths:
            raise MaskError(
                f"all rows of a batch have one length, but masks[{i}] is {row.lengths[0]} × {row.lengths[1]} and masks[0] is "
                f"{rows[0].lengths[0]} × {rows[0].lengths[1]} (queries × keys): make padding a document of its own"
            )
    n = rows[0].lengths[0]
    return BatchMask(rows, name=f"per_row({len(rows)} row{'s' * (len(rows) != 1)} of {n} tokens)")


def _rebuilt(rows: tuple[Mask, ...], name: str) -> BatchMask:
    return BatchMask(rows, name=name)
