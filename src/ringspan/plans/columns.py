"""The programs of all ranks as columns of arrays: what their cost depends on, without an object for each message and
band.

Making the programs of 64 ranks takes ten times as long. The automatic choice costs most candidates from their columns,
and only the chosen one becomes a program, that of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringspan.masks.table import Table
from ringspan.plans.data import AS_ACCUMULATED, DkvDtype, PayloadKind, Phase
from ringspan.plans.problem import Ints


class Messages(NamedTuple):
    """All messages of one payload in a phase: ``rows`` rows from ``sender`` to ``receiver`` in step ``step``, in as many
    transfers as ``transfers`` says.

    ``is_packed`` is 1 where the rows are packed into a buffer (``Transfer.is_packed``), else 0.
    ``packs`` is 1 where the sender packs them: rows that it sends to several receivers are packed for the first.
    """

    what: PayloadKind
    sender: Ints
    receiver: Ints
    step: Ints
    rows: Ints
    transfers: Ints
    is_packed: Ints
    packs: Ints


class Tasks(NamedTuple):
    """The tasks of all ranks, one in each step at most, ordered by rank and step, and their bands.

    ``first`` is the index of the first band of each task.
    """

    rank: Ints
    step: Ints
    q_slot: Ints
    kv_slot: Ints
    bands: Table
    first: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramColumns:
    """The programs of all ranks. They select no heads, and have one exchange in flight. Both phases have the same
    tasks.

    ``steps`` is the number of steps of each phase. ``messages`` has at most one entry for each payload. ``q_slots`` and
    ``kv_slots`` have a row for each rank and a column for each slot, with the rows of the slot.
    """

    world: int
    steps: dict[Phase, int]
    tasks: Tasks
    messages: dict[Phase, tuple[Messages, ...]]
    q_slots: Ints
    kv_slots: Ints
    dkv_dtype: DkvDtype = AS_ACCUMULATED

    def per_step(self, rank: Ints, step: Ints, values: Ints, phase: Phase) -> Ints:
        """Return the sums of the values for each rank and step."""
        size = self.world, self.steps[phase]
        total = np.bincount(rank * size[1] + step, weights=values, minlength=size[0] * size[1])
        return total.astype(np.int64).reshape(size)
