"""Plans walked cell by cell, as plainly as can be: what ``verify`` proves with symbols and formulas, counted.

Every slot holds global tokens, one number a row. Beside a query slot lie counts (rows × all keys): how often each key has
been taken into the row's result. Beside a key slot lie counts (rows × all queries). Transfers do what the table in
ringspan/plans/plan.py says.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringspan.plans import Plan, Step, Task, Transfer
from ringspan.plans.data import Phase
from tests import truth

Ints = NDArray[np.int64]


class Rank:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        q_len, k_len = plan.mask.lengths
        self.q = [np.full(slot.rows, -1) for slot in plan.program.q_slots]
        self.kv = [np.full(slot.rows, -1) for slot in plan.program.kv_slots]
        self.q[0][:] = plan.q_layout.positions(plan.rank)
        self.kv[0][:] = plan.kv_layout.positions(plan.rank)
        self.out = [np.zeros((len(rows), k_len), dtype=np.int64) for rows in self.q]
        self.dq = [np.zeros((len(rows), k_len), dtype=np.int64) for rows in self.q]
        self.dkv = [np.zeros((len(rows), q_len), dtype=np.int64) for rows in self.kv]

    def read(self, t: Transfer) -> Ints:
        return np.concatenate([getattr(self, t.what)[t.slot][a:b] for a, b in t.rows])

    def write(self, t: Transfer, message: Ints) -> None:
        rows = np.concatenate([np.arange(a, b) for a, b in t.rows])
        assert len(message) == len(rows)
        if t.what in ("out", "dq", "dkv"):
            getattr(self, t.what)[t.slot][rows] += message
            return
        getattr(self, t.what)[t.slot][rows] = message
        for result in ("out", "dq") if t.what == "q" else ("dkv",):
            getattr(self, result)[t.slot][rows] = 0

    def compute(self, task: Task, phase: Phase) -> None:
        q_tokens, k_tokens = self.q[task.q_slot], self.kv[task.kv_slot]
        for band in task.bands:
            i, j = np.nonzero(truth.band(band, len(q_tokens), len(k_tokens)))
            assert (q_tokens[i] >= 0).all()
            assert (k_tokens[j] >= 0).all()
            if phase == "forward":
                np.add.at(self.out[task.q_slot], (i, k_tokens[j]), 1)
            else:
                np.add.at(self.dq[task.q_slot], (i, k_tokens[j]), 1)
                np.add.at(self.dkv[task.kv_slot], (j, q_tokens[i]), 1)


def walk(plans: Sequence[Plan], phase: Phase) -> list[Rank]:
    """All ranks in step; every message sent is received."""
    ranks = [Rank(plan) for plan in plans]
    programs = [plan.program.steps(phase) for plan in plans]
    for n in range(max(map(len, programs))):
        steps = [program[n] if n < len(program) else Step() for program in programs]
        mail: dict[tuple[int, int], deque[tuple[str, Ints]]] = defaultdict(deque)
        for rank, step in zip(ranks, steps, strict=True):
            for t in step.sends:
                mail[rank.plan.rank, t.peer].append((t.what, rank.read(t)))
        for rank, step in zip(ranks, steps, strict=True):
            for task in step.tasks:
                rank.compute(task, phase)
        for rank, step in zip(ranks, steps, strict=True):
            for t in step.recvs:
                what, message = mail[t.peer, rank.plan.rank].popleft()
                assert what == t.what
                rank.write(t, message)
        assert not any(mail.values())
    return ranks


def assert_exactly_once(plans: Sequence[Plan]) -> None:
    """Every result that is at home in the end has taken in each visible pair once, and nothing else."""
    dense = plans[0].mask.dense().astype(np.int64)
    for rank in walk(plans, "forward"):
        assert np.array_equal(rank.out[0], dense[rank.q[0]])
    for rank in walk(plans, "backward"):
        assert np.array_equal(rank.dq[0], dense[rank.q[0]])
        assert np.array_equal(rank.dkv[0], dense.T[rank.kv[0]])
