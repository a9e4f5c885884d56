"""The bookkeeping of an accumulator: the state of each row, and the parts that wait to be combined.

For the meaning of the states, and a drawing of their transitions, see :mod:`ringspan.kernels.accumulators`.
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor


class RowState(IntEnum):
    EMPTY = 0  # no part yet
    KEPT = 1  # one part, in the tensor that the kernel wrote
    WAITING = 2  # two parts: one kept, one waiting
    WIDE = 3  # in the wide buffer


class RowStates:
    """The state of every row, stored as runs of rows in the same state.

    >>> states = RowStates(8)
    >>> states.set(2, 5, RowState.WIDE)
    >>> [(start, stop, state.name) for start, stop, state in states.between(0, 4)]
    [(0, 2, 'EMPTY'), (2, 4, 'WIDE')]
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._runs = [(0, rows, RowState.EMPTY)] if rows else []

    def between(self, start: int, stop: int) -> list[tuple[int, int, RowState]]:
        """The runs of the rows ``start:stop``."""
        if len(self._runs) == 1:  # the common case
            ((a, b, state),) = self._runs
            return [(max(a, start), min(b, stop), state)] if a < stop and start < b else []
        return [(max(a, start), min(b, stop), state) for a, b, state in self._runs if a < stop and start < b]

    def has(self, *states: RowState) -> bool:
        """Whether any row is in one of these states."""
        return any(state in states for *_, state in self._runs)

    def set(self, start: int, stop: int, state: RowState) -> None:
        if start >= stop:
            return
        if stop - start == self._rows:  # the common case
            self._runs = [(start, stop, state)]
            return
        runs: list[tuple[int, int, RowState]] = []
        for a, b, s in self._runs:
            for c, d, t in ((a, min(b, start), s), (max(a, start), min(b, stop), state), (max(a, stop), b, s)):
                if c >= d:
                    continue
                if runs and runs[-1][2] == t:
                    runs[-1] = (runs[-1][0], d, t)
                else:
                    runs.append((c, d, t))
        self._runs = runs


class WaitingParts:
    """Parts that wait to be combined with a kept one: at most one for each row. Tensors have rows first."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, tuple[Tensor, ...]]] = []

    def put(self, start: int, stop: int, part: tuple[Tensor, ...]) -> None:
        self._parts.append((start, stop, part))

    def pop(self, start: int, stop: int) -> list[tuple[int, int, tuple[Tensor, ...]]]:
        """Remove and return the parts of the rows ``start:stop``, each with its rows."""
        if not self._parts:
            return []
        popped, left = [], []
        for a, b, part in self._parts:
            low, high = max(a, start), min(b, stop)
            if low >= high:
                left.append((a, b, part))
                continue
            if (low, high) == (a, b):
                popped.append((a, b, part))
                continue
            popped.append((low, high, tuple(x[low - a : high - a] for x in part)))
            left += [(c, d, tuple(x[c - a : d - a] for x in part)) for c, d in ((a, low), (high, b)) if c < d]
        self._parts = left
        return popped
