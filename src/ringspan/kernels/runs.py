"""How far each row of a slot has come, kept as runs of rows."""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    FRESH = 0  # nothing has come for the row
    KEPT = 1  # one part, which is still where the kernel wrote it
    WIDE = 2  # in the wide buffer


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

    def set(self, start: int, stop: int, state: State) -> None:
        if start >= stop or any(a <= start and stop <= b and s == state for a, b, s in self._runs):
            return
        cut = [run for a, b, s in self._runs for run in ((a, min(b, start), s), (max(a, stop), b, s)) if run[0] < run[1]]
        joined: list[tuple[int, int, State]] = []
        for a, b, s in sorted([*cut, (start, stop, state)]):
            if joined and joined[-1][2] == s:
                joined[-1] = (joined[-1][0], b, s)
            else:
                joined.append((a, b, s))
        self._runs = joined
