"""What every owner must hold in the end: the sums of the random weights that :mod:`ringspan.plans.verify` adds.

Legend: H heads, S rows of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringspan.plans.data import Task, side
from ringspan.plans.symbolic_slots import ROW_BITS, Ints, SymbolicSlots


class ExpectedWeights:
    """The sum of the weights added to each head of each row, by owner: what the owner must have in the end.

    A weight is multiplied by a factor of the row and head: rows of one band have the same weight, but other factors.
    """

    def __init__(self, rows: Sequence[int], heads: int, rng: np.random.Generator) -> None:
        self.heads = heads
        self.start = np.concatenate([[0], np.cumsum(np.repeat(rows, heads))])
        self.total = np.zeros(self.start[-1], dtype=np.uint64)
        self._factor = rng.integers(1, 2**64, self.start[-1], dtype=np.uint64)

    def add(self, ids: Ints, weight: np.uint64) -> NDArray[np.uint64]:
        """Add a weight to some rows. Returns what was added to each of them."""
        indices = self._indices(ids)
        added: NDArray[np.uint64] = self._factor[indices] * weight  # modulo 2⁶⁴
        self.total[indices] += added
        return added

    def at(self, ids: Ints) -> NDArray[np.uint64]:
        found: NDArray[np.uint64] = self.total[self._indices(ids)]
        return found

    def _indices(self, ids: Ints) -> Ints:
        indices: Ints = self.start[ids >> ROW_BITS] + (ids & ((1 << ROW_BITS) - 1))
        return indices

    def of(self, rank: int) -> NDArray[np.uint64]:
        first, last = self.start[rank * self.heads], self.start[(rank + 1) * self.heads]
        return self.total[first:last].reshape(self.heads, -1)


def add_weights(
    r: SymbolicSlots,
    task: Task,
    results: Sequence[str],
    expected: dict[str, ExpectedWeights],
    rng: np.random.Generator,
    where: str,
) -> None:
    """Add a random weight to all rows of each band, per head, times the factor of the row, and the same to the owner's
    expected sum."""
    for result in results:
        of = side(result)
        slot = task.kv_slot if of == "kv" else task.q_slot
        ids_HS = r.ids[of][slot]
        for band in task.bands:
            a, b = (band.k0, band.k1) if of == "kv" else (band.q0, band.q1)
            r.check_not_complete(result, slot, slice(None), a, b, where)
            for head, ids in enumerate(ids_HS[:, a:b]):
                weight = rng.integers(1, 2**62, dtype=np.uint64)
                r.weights[result][slot][head, a:b] += expected[of].add(ids, weight)
