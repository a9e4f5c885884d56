"""A band: a rectangle of queries × keys cut by two diagonals.

Query ``q`` sees key ``k`` iff ``q0 <= q < q1``, ``k0 <= k < k1`` and ``lo <= k - q <= hi``::

    causal, 5 tokens                  window(left=1, right=1)           documents of 2 and 3, causal
    Band(0, 5, 0, 5, lo=-4, hi=0)     Band(0, 5, 0, 5, lo=-1, hi=1)     Band(0, 2, 0, 2, -1, 0)
                                                                        Band(2, 5, 2, 5, -2, 0)
    x . . . .                         x x . . .                         x . . . .
    x x . . .                         x x x . .                         x x . . .
    x x x . .                         . x x x .                         . . x . .
    x x x x .                         . . x x x                         . . x x .
    x x x x x                         . . . x x                         . . x x x

Every mask of this library is a set of disjoint bands. Sets of bands are closed under all operations of the planner:
clipping to a rectangle, shifting, intersection and difference. The area of a band is a closed formula.
"""

from __future__ import annotations

from typing import NamedTuple


class Band(NamedTuple):
    """One band. Bands of a table are *tight*: no row or column is empty, and ``lo`` and ``hi`` lie within the
    rectangle's corners."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int

    @property
    def rows(self) -> int:
        return self.q1 - self.q0

    @property
    def cols(self) -> int:
        return self.k1 - self.k0

    @property
    def is_full(self) -> bool:
        """Whether the band is the whole rectangle."""
        return self.lo <= self.k0 - self.q1 + 1 and self.hi >= self.k1 - 1 - self.q0

    @property
    def cut_below(self) -> bool:
        """Whether the lower diagonal hides keys on the left, as a sliding window does."""
        return self.lo > self.k0 - self.q1 + 1

    @property
    def cut_above(self) -> bool:
        """Whether the upper diagonal hides keys on the right, as a causal mask does."""
        return self.hi < self.k1 - 1 - self.q0

    @property
    def area(self) -> int:
        """The number of (query, key) pairs in the band.

        >>> Band(0, 5, 0, 5, -4, 0).area
        15
        """
        return self._below(self.hi) - self._below(self.lo - 1)

    def _below(self, diagonal: int) -> int:
        """Return the number of pairs of the rectangle with ``k - q <= diagonal``: row i holds ``clamp(i + edge + 1, 0,
        cols)`` of them."""
        edge = diagonal - (self.k0 - self.q0)
        return _staircase(self.rows + edge, self.cols) - _staircase(edge, self.cols)

    def shifted(self, dq: int, dk: int) -> Band:
        """Return the same shape, ``dq`` queries down and ``dk`` keys to the right."""
        shift = dk - dq
        return Band(self.q0 + dq, self.q1 + dq, self.k0 + dk, self.k1 + dk, self.lo + shift, self.hi + shift)


def _staircase(x: int, width: int) -> int:
    """Return the sum of ``clamp(t, 0, width)`` over all ``t <= x``."""
    t = min(max(x, 0), width)
    return t * (t + 1) // 2 + max(x - width, 0) * width
