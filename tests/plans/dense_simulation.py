"""Plans simulated pair by pair, as simply as possible: what ``verify`` checks with ids and formulas, counted.

Every slot holds global tokens, one number for each head and row: ``head * length + token``. Beside a query slot lie
counts (heads × rows × all keys of all heads): how often each key has been taken into the row's result. Beside a key
slot lie counts (heads × rows × all queries of all heads). Transfers do what the table in ringspan/plans/data.py says.
The upstream gradient of a query is the query's number. The backward pass begins with the numbers of kept slots.

Legend: H heads of a slot, S its rows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringspan.planner import Plan
from ringspan.plans import Step, Task, Transfer
from ringspan.plans.data import Phase
from tests import dense_masks

Ints = NDArray[np.int64]


class Rank:
    def __init__(self, plan: Plan, forward: Rank | None = None) -> None:
        self.plan = plan
        self.heads = plan.program.heads or (1, 1)
        (q_len, k_len), (q_heads, k_heads) = plan.mask.lengths, self.heads
        self.q = [np.full((q_heads if slot.heads is None else slot.heads, slot.rows), -1) for slot in plan.program.q_slots]
        self.kv = [np.full((k_heads if slot.heads is None else slot.heads, slot.rows), -1) for slot in plan.program.kv_slots]
        self.q[0][:] = np.arange(q_heads)[:, None] * q_len + plan.q_layout.positions(plan.rank)
        self.kv[0][:] = np.arange(k_heads)[:, None] * k_len + plan.kv_layout.positions(plan.rank)
        for slots, names, before in (
            (plan.program.q_slots, self.q, forward and forward.q),
            (plan.program.kv_slots, self.kv, forward and forward.kv),
        ):
            for n, slot in enumerate(slots):
                if slot.kept and before:
                    names[n] = before[n].copy()
        self.dout = [self.q[0].copy(), *(np.full_like(names, -1) for names in self.q[1:])]
        self.out = [np.zeros((*names.shape, k_heads * k_len), dtype=np.int64) for names in self.q]
        self.dq = [np.zeros((*names.shape, k_heads * k_len), dtype=np.int64) for names in self.q]
        self.dkv = [np.zeros((*names.shape, q_heads * q_len), dtype=np.int64) for names in self.kv]

    def read(self, t: Transfer) -> Ints:
        return np.concatenate([getattr(self, t.what)[t.slot][_heads(t), a:b] for a, b in t.rows], axis=1)

    def write(self, t: Transfer, message: Ints, phase: Phase) -> None:
        rows = np.concatenate([np.arange(a, b) for a, b in t.rows])
        target = getattr(self, t.what)[t.slot][_heads(t)]
        assert message.shape == (len(target), len(rows), *target.shape[2:])
        if t.what in ("out", "dq", "dkv"):
            target[:, rows] += message
            return
        slot = (self.plan.program.kv_slots if t.what == "kv" else self.plan.program.q_slots)[t.slot]
        assert phase == "forward" or slot.kept == (t.what == "dout"), "a kept slot receives dout and nothing else"
        target[:, rows] = message
        if t.what == "q":
            self.dout[t.slot][_heads(t)][:, rows] = message
        for result in {"q": ("out", "dq"), "dout": ("dq",), "kv": ("dkv",)}[t.what]:
            getattr(self, result)[t.slot][:, rows] = 0

    def assert_kept_outputs_are_complete(self) -> None:
        for slot, names, out in zip(self.plan.program.q_slots, self.q, self.out, strict=True):
            if slot.kept:
                assert np.array_equal(out[names >= 0], everything([self.plan])[names[names >= 0]])

    def compute(self, task: Task, phase: Phase) -> None:
        q_HS, k_HS = self.q[task.q_slot], self.kv[task.kv_slot]
        assert len(q_HS) % len(k_HS) == 0
        for band in task.bands:
            i, j = np.nonzero(dense_masks.band(band, q_HS.shape[1], k_HS.shape[1]))
            for h in range(len(q_HS)):
                g = h * len(k_HS) // len(q_HS)
                assert (q_HS[h, i] >= 0).all()
                assert (k_HS[g, j] >= 0).all()
                if phase == "forward":
                    np.add.at(self.out[task.q_slot][h], (i, k_HS[g, j]), 1)
                else:
                    assert (self.dout[task.q_slot][h, i] == q_HS[h, i]).all()
                    np.add.at(self.dq[task.q_slot][h], (i, k_HS[g, j]), 1)
                    np.add.at(self.dkv[task.kv_slot][g], (j, q_HS[h, i]), 1)


def _heads(t: Transfer) -> slice:
    return slice(None) if t.heads is None else slice(*t.heads)


def simulate(plans: Sequence[Plan], phase: Phase) -> list[Rank]:
    """Run all ranks in lock-step. Every message that is sent must be received. A message is received at the end of its
    step, or some steps later if the program has several exchanges in flight."""
    before = simulate(plans, "forward") if phase == "backward" else [None] * len(plans)
    for rank in filter(None, before):
        rank.assert_kept_outputs_are_complete()
    ranks = [Rank(plan, forward) for plan, forward in zip(plans, before, strict=True)]
    programs = [plan.program.steps(phase) for plan in plans]
    (in_flight,) = {plan.program.in_flight for plan in plans}
    sent: deque[tuple[list[Step], dict[tuple[int, int], deque[tuple[str, Ints]]]]] = deque()
    count = max(map(len, programs))
    for n in range(count):
        steps = [program[n] if n < len(program) else Step() for program in programs]
        mail: dict[tuple[int, int], deque[tuple[str, Ints]]] = defaultdict(deque)
        for rank, step in zip(ranks, steps, strict=True):
            for t in step.sends:
                mail[rank.plan.rank, t.peer].append((t.what, rank.read(t)))
        sent.append((steps, mail))
        for rank, step in zip(ranks, steps, strict=True):
            for task in step.tasks:
                rank.compute(task, phase)
        while len(sent) >= in_flight or (sent and n == count - 1):
            steps, mail = sent.popleft()
            for rank, step in zip(ranks, steps, strict=True):
                for t in step.recvs:
                    what, message = mail[t.peer, rank.plan.rank].popleft()
                    assert what == t.what
                    rank.write(t, message, phase)
            assert not any(mail.values())
    return ranks


def everything(plans: Sequence[Plan]) -> Ints:
    """Return the visible pairs: all queries of all heads × all keys of all heads."""
    q_heads, k_heads = plans[0].program.heads or (1, 1)
    shares = np.arange(q_heads)[:, None] * k_heads // q_heads == np.arange(k_heads)
    return np.kron(shares, plans[0].mask.dense()).astype(np.int64)


def assert_exactly_once(plans: Sequence[Plan]) -> None:
    """Every result at its owner must contain each visible pair once, and nothing else."""
    pairs = everything(plans)
    for rank in simulate(plans, "forward"):
        assert np.array_equal(rank.out[0], pairs[rank.q[0]])
    for rank in simulate(plans, "backward"):
        assert np.array_equal(rank.dq[0], pairs[rank.q[0]])
        assert np.array_equal(rank.dkv[0], pairs.T[rank.kv[0]])
