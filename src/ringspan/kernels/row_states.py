"""The bookkeeping of an accumulator: the state of each row, and the partial results that are not yet combined.

For the meaning of the states, and a drawing of their transitions, see :mod:`ringspan.kernels.accumulators`.
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor


class RowState(IntEnum):
    EMPTY = 0  # no partial result yet
    BORROWED = 1  # one partial result, in the tensor that the kernel returned
    PENDING = 2  # two partial results: one borrowed, one not yet combined with it
    ACCUMULATED = 3  # in the buffer of the accumulation dtype


class RowStates:
    """The state of every row, stored as runs of rows in the same state.

    >>> states = RowStates(8)
    >>> states.set(2, 5, RowState.ACCUMULATED)
    >>> [(start, stop, state.name) for start, stop, state in states.between(0, 4)]
    [(0, 2, 'EMPTY'), (2, 4, 'ACCUMULATED')]
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._runs = [(0, rows, RowState.EMPTY)] if rows else []

    def between(self, start: int, stop: int) -> list[tuple[int, int, RowState]]:
        """Return the runs of the rows ``start:stop``."""
        if len(self._runs) == 1:  # the common case
            ((first, last, state),) = self._runs
            return [(max(first, start), min(last, stop), state)] if first < stop and start < last else []
        return [
            (max(first, start), min(last, stop), state) for first, last, state in self._runs if first < stop and start < last
        ]

    def has(self, *states: RowState) -> bool:
        """Return whether any row is in one of these states."""
        return any(state in states for *_, state in self._runs)

    def set(self, start: int, stop: int, state: RowState) -> None:
        if start >= stop:
            return
        if stop - start == self._rows:  # the common case
            self._runs = [(start, stop, state)]
            return
        runs: list[tuple[int, int, RowState]] = []
        for first, last, old in self._runs:
            before = (first, min(last, start), old)
            changed = (max(first, start), min(last, stop), state)
            after = (max(first, stop), last, old)
            for low, high, new in (before, changed, after):
                if low >= high:
                    continue
                if runs and runs[-1][2] == new:
                    runs[-1] = (runs[-1][0], high, new)
                else:
                    runs.append((low, high, new))
        self._runs = runs


class PendingPartials:
    """Partial results that are not yet combined with a borrowed one, at most one for each row. Tensors have rows first."""

    def __init__(self) -> None:
        self._partials: list[tuple[int, int, tuple[Tensor, ...]]] = []

    def put(self, start: int, stop: int, partial: tuple[Tensor, ...]) -> None:
        self._partials.append((start, stop, partial))

    def pop(self, start: int, stop: int) -> list[tuple[int, int, tuple[Tensor, ...]]]:
        """Remove and return the partial results of the rows ``start:stop``, each with the first and the last row + 1."""
        if not self._partials:
            return []
        popped, left = [], []
        for first, last, partial in self._partials:
            low, high = max(first, start), min(last, stop)
            if low >= high:
                left.append((first, last, partial))
                continue
            if (low, high) == (first, last):
                popped.append((first, last, partial))
                continue
            popped.append((low, high, tuple(x[low - first : high - first] for x in partial)))
            for begin, end in ((first, low), (high, last)):
                if begin < end:
                    left.append((begin, end, tuple(x[begin - first : end - first] for x in partial)))
        self._partials = left
        return popped
