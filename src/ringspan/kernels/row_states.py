"""How far each row of a slot has come, kept as runs of rows."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor


class State(IntEnum):
    FRESH = 0  # nothing has come for the row
    KEPT = 1  # one part, which is still where the kernel wrote it
    LATE = 2  # a second part waits: for a third, which makes both wide, or for the end, when it goes right into the kept one
    WIDE = 3  # in the wide buffer


class Runs:
    """The state of every row.

    >>> runs = Runs(8)
    >>> runs.set(2, 5, State.WIDE)
    >>> [(start, stop, state.name) for start, stop, state in runs.of(0, 4)]
    [(0, 2, 'FRESH'), (2, 4, 'WIDE')]
    """

    def __init__(self, rows: int) -> None:
        self._runs = [(0, rows, State.FRESH)] if rows else []

    def of(self, start: int, stop: int) -> list[tuple[int, int, State]]:
        """The rows from start to stop, cut where the state changes."""
        return [(max(a, start), min(b, stop), state) for a, b, state in self._runs if a < stop and start < b]

    def has(self, *states: State) -> bool:
        """Whether any row is in one of these states."""
        return any(state in states for *_, state in self._runs)

    def set(self, start: int, stop: int, state: State) -> None:
        if start >= stop:
            return
        runs: list[tuple[int, int, State]] = []
        for a, b, s in self._runs:
            for c, d, t in ((a, min(b, start), s), (max(a, start), min(b, stop), state), (max(a, stop), b, s)):
                if c >= d:
                    continue
                if runs and runs[-1][2] == t:
                    runs[-1] = (runs[-1][0], d, t)
                else:
                    runs.append((c, d, t))
        self._runs = runs


class Late:
    """Parts that wait, each for rows of its own. Tensors are rows first."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, tuple[Tensor, ...]]] = []

    def put(self, start: int, stop: int, *part: Tensor) -> None:
        self._parts.append((start, stop, part))

    def take(self, start: int, stop: int) -> list[tuple[int, int, tuple[Tensor, ...]]]:
        """What waits for the rows from start to stop, and waits no longer."""
        taken, left = [], []
        for a, b, part in self._parts:
            low, high = max(a, start), min(b, stop)
            if low >= high:
                left.append((a, b, part))
                continue
            if (low, high) == (a, b):
                taken.append((a, b, part))
                continue
            taken.append((low, high, tuple(x[low - a : high - a] for x in part)))
            left += [(c, d, tuple(x[c - a : d - a] for x in part)) for c, d in ((a, low), (high, b)) if c < d]
        self._parts = left
        return taken
