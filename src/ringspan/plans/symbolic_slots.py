"""A rank's slots with integer ids in place of tensors: the state that :mod:`ringspan.plans.verify` simulates.

Every (row, head) of a slot holds the id of its content, ``(rank * heads + head) << 32 | row``: rank, head and local row
of the owner. Random weights stand for the outputs and gradients.

Legend: H heads, S rows of a slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.errors import PlanError
from ringspan.layouts import Layout
from ringspan.plans.data import KINDS_OF_PHASE, PHASES, PayloadKind, Phase, RankPlan, Side, Slot, Step, Task, Transfer, side
from ringspan.plans.slot_tokens import SlotTokens

Ints = NDArray[np.int64]
NOTHING = -1
# What is zero again when rows of a kind are overwritten.
RESET_BY: dict[PayloadKind, tuple[str, ...]] = {"q": ("out", "dq"), "dout": ("dq",), "kv": ("dkv",)}
ROW_BITS = 32


class Heads(NamedTuple):
    """The numbers of heads that the check distinguishes. ``q`` counts units: ``unit`` query heads that share a key head
    and always move together. ``kv`` counts key heads."""

    q: int
    kv: int
    unit: int = 1

    @property
    def shared(self) -> int:
        """How many units of query heads share a key head."""
        return self.q // self.kv


def heads_of(plans: Sequence[RankPlan]) -> Heads:
    """Return the heads that the plans of a world distinguish: one, if their programs name no heads."""
    if len({p.program.heads for p in plans}) != 1:
        raise PlanError("the ranks' programs are for different numbers of heads")
    given = plans[0].program.heads
    named = {n for p in plans for n in _named_heads(p)}
    if given is None:
        if named:
            raise PlanError("the plan names heads, but its program does not say how many there are (Program.heads)")
        return Heads(1, 1)
    q, kv = given
    if kv < 1 or q < 1 or q % kv:
        raise PlanError(f"the program is for {q} query heads and {kv} key heads: they cannot be shared evenly")
    ratios = (ratio for p in plans for ratio in _ratios(p, q, kv))
    unit = math.gcd(q // kv, *(n for of, n in named if of == "q"), *ratios)
    return Heads(q // unit, kv, unit)


def _named_heads(plan: RankPlan) -> Iterator[tuple[str, int]]:
    for of, slots in (("q", plan.program.q_slots), ("kv", plan.program.kv_slots)):
        yield from ((of, slot.heads) for slot in slots if slot.heads is not None)
    for phase in PHASES:
        for direction in ("sends", "recvs"):
            for t in plan.transfers(phase, direction):
                yield from ((side(t.what), n) for n in t.heads or ())


def _ratios(plan: RankPlan, q: int, kv: int) -> Iterator[int]:
    """Yield how many query heads share a key head, for each pair of slots of a task."""
    q_slots, kv_slots = plan.program.q_slots, plan.program.kv_slots
    pairs = {(task.q_slot, task.kv_slot) for phase in PHASES for step in plan.program.steps(phase) for task in step.tasks}
    for i, j in pairs:
        if i < len(q_slots) and j < len(kv_slots):
            of_q, of_kv = q_slots[i].heads, kv_slots[j].heads
            yield (q if of_q is None else of_q) // max(1, kv if of_kv is None else of_kv)


class SymbolicSlots:
    """One rank's slots in one phase. ``forward`` are its slots at the end of the forward pass: the backward pass begins
    with what is kept of them."""

    def __init__(self, plan: RankPlan, heads: Heads, forward: SymbolicSlots | None = None) -> None:
        self.plan, self.heads, program = plan, heads, plan.program
        self.phase: Phase = "forward" if forward is None else "backward"
        self.ids = {
            "q": [self._empty(slot, heads.q, heads.unit) for slot in program.q_slots],
            "kv": [self._empty(slot, heads.kv, 1) for slot in program.kv_slots],
        }
        for of, count, rows in (("q", heads.q, plan.q_rows), ("kv", heads.kv, plan.kv_rows)):
            owner_heads_H1 = plan.rank * count + np.arange(count)[:, None]
            self.ids[of][0][:] = (owner_heads_H1 << ROW_BITS) + np.arange(rows)
        if forward is not None:
            # The upstream gradient of a query has the id of the query. Slot 0 has that of the rank's own.
            self.ids["dout"] = [np.full_like(ids, NOTHING) for ids in self.ids["q"]]
            self.ids["dout"][0][:] = self.ids["q"][0]
            for of, slots in (("q", program.q_slots), ("kv", program.kv_slots)):
                for n, slot in enumerate(slots):
                    if slot.kept:
                        self.ids[of][n][:] = forward.ids[of][n]
        self.weights = {
            what: [np.zeros(ids.shape, dtype=np.uint64) for ids in self.ids[side(what)]] for what in ("out", "dq", "dkv")
        }
        # The own results that have arrived complete.
        self._complete = {what: np.zeros(slots[0].shape, dtype=bool) for what, slots in self.weights.items()}

    @staticmethod
    def _empty(slot: Slot, heads: int, unit: int) -> Ints:
        return np.full((heads if slot.heads is None else slot.heads // unit, slot.rows), NOTHING)

    def shape(self, t: Transfer) -> tuple[int, int]:
        """Return the heads and rows of the message."""
        start, stop = self.span(t)
        return stop - start, t.count

    def span(self, t: Transfer) -> tuple[int, int]:
        """Return the range of the slot's heads that the message holds."""
        unit = self.heads.unit if side(t.what) == "q" else 1
        return (0, len(self.ids[side(t.what)][t.slot])) if t.heads is None else (t.heads[0] // unit, t.heads[1] // unit)

    def check(self, t: Transfer, where: str) -> None:
        """Raise unless the slot has these rows and heads."""
        slots = self.ids[side(t.what)]
        rows = slots[t.slot].shape[1] if 0 <= t.slot < len(slots) else 0
        if not t.rows or any(not 0 <= a < b <= rows for a, b in t.rows):
            raise PlanError(f"{where}: {t.what} rows {t.rows} do not lie in slot {t.slot}")
        if t.heads is not None and not 0 <= self.span(t)[0] < self.span(t)[1] <= len(slots[t.slot]):
            raise PlanError(f"{where}: {t.what} heads {t.heads} do not lie in slot {t.slot}")
        if t.what not in KINDS_OF_PHASE[self.phase]:
            raise PlanError(f"{where}: moves {t.what}, which the {self.phase} pass does not have")
        if t.complete and t.what not in self.weights:
            raise PlanError(f"{where}: moves {t.what} as complete, but only results can be: {', '.join(self.weights)}")

    def check_kept(self, step: Step, where: str) -> None:
        """Raise if a step of the backward pass moves other rows than the upstream gradient to or from the queries of a
        kept slot, or keys to one. Nothing may overwrite what the forward pass has left there."""
        q_slots, kv_slots = self.plan.program.q_slots, self.plan.program.kv_slots
        for t in (*step.sends, *step.recvs):
            if t.what == "q" and q_slots[t.slot].kept:
                raise PlanError(f"{where}: moves q of slot {t.slot}, which is kept: only its dout can be sent")
            if t.what == "dout" and t.slot != 0 and not q_slots[t.slot].kept:
                raise PlanError(f"{where}: moves dout of slot {t.slot}, whose queries are not kept")
        for t in step.recvs:
            if t.what == "kv" and kv_slots[t.slot].kept:
                raise PlanError(f"{where}: receives kv into slot {t.slot}, which is kept")

    def read(self, t: Transfer, where: str) -> NDArray[np.generic]:
        array_HS = self._array(t)[slice(*self.span(t))]
        message_HS = np.concatenate([array_HS[:, a:b] for a, b in t.rows], axis=1)
        if t.what in self.ids and (message_HS == NOTHING).any():
            raise PlanError(f"{where}: sends {t.what} rows of slot {t.slot} that hold nothing yet")
        return message_HS

    def write(self, t: Transfer, message_HS: NDArray[np.generic], where: str) -> None:
        array_HS = self._array(t)[slice(*self.span(t))]
        if t.what in self.weights:
            self._check_added(t, array_HS, where)
        at = 0
        for a, b in t.rows:
            part_HS = message_HS[:, at : at + b - a]
            at += b - a
            if t.what in self.ids:
                array_HS[:, a:b] = part_HS
                if t.what == "q" and self.phase == "backward":  # queries are sent with their upstream gradients
                    self.ids["dout"][t.slot][slice(*self.span(t)), a:b] = part_HS
                for result in RESET_BY[t.what]:
                    self.weights[result][t.slot][:, a:b] = 0
            else:
                array_HS[:, a:b] += part_HS  # type: ignore[misc]

    def _check_added(self, t: Transfer, sums_HS: NDArray[np.generic], where: str) -> None:
        """Raise if a result is added to a complete one, or a complete result is not the first of its rows."""
        if t.complete and t.slot != 0:
            raise PlanError(f"{where}: receives complete {t.what} into slot {t.slot}, but their owner has them in slot 0")
        heads = slice(*self.span(t))
        for a, b in t.rows:
            self.check_not_complete(t.what, t.slot, heads, a, b, where)
            if t.complete:
                if sums_HS[:, a:b].any():
                    raise PlanError(f"{where}: receives complete {t.what} for rows {a} to {b}, which have a part already")
                self._complete[t.what][heads, a:b] = True

    def check_not_complete(self, what: str, slot: int, heads: slice, a: int, b: int, where: str) -> None:
        """Raise if rows of own results have arrived complete."""
        if slot == 0 and self._complete[what][heads, a:b].any():
            raise PlanError(f"{where}: adds {what} to rows {a} to {b} of slot 0, which have arrived complete")

    def _array(self, t: Transfer) -> NDArray[np.generic]:
        group = self.ids if t.what in self.ids else self.weights
        slots: Sequence[NDArray[np.generic]] = group[t.what]
        return slots[t.slot]

    def ids_of(self, task: Task, where: str) -> tuple[Ints, Ints]:
        """Return the ids of a task's queries and keys, head by head: each query head with the key head it shares."""
        if not 0 <= task.q_slot < len(self.ids["q"]) or not 0 <= task.kv_slot < len(self.ids["kv"]):
            raise PlanError(f"{where}: a task uses slots {task.q_slot} and {task.kv_slot}, which the plan does not have")
        q_HS, k_HS = self.ids["q"][task.q_slot], self.ids["kv"][task.kv_slot]
        if not len(k_HS) or len(q_HS) * self.heads.unit % len(k_HS):
            raise PlanError(f"{where}: {len(q_HS) * self.heads.unit} query heads cannot share {len(k_HS)} key heads evenly")
        if self.phase == "backward":
            wrong_HS = self.ids["dout"][task.q_slot] != q_HS
            if any(wrong_HS[:, band.q0 : band.q1].any() for band in task.bands):
                raise PlanError(f"{where}: a task reads rows of q slot {task.q_slot} without their dout")
        return q_HS, np.repeat(k_HS, len(q_HS) // len(k_HS), axis=0)

    def wrong_tokens(self, task: Task, first_heads: Mapping[Side, Ints]) -> Iterator[str]:
        """Yield an error if the slots hold other tokens or heads than the task records. ``first_heads`` has the id of
        head 0 of each token."""
        sides: tuple[tuple[Side, int, SlotTokens | None, int], ...] = (
            ("q", task.q_slot, task.q_tokens, max((band.q1 for band in task.bands), default=0)),
            ("kv", task.kv_slot, task.kv_tokens, max((band.k1 for band in task.bands), default=0)),
        )
        for of, slot, recorded, rows in sides:
            held_HS = self.ids[of][slot]
            if recorded is None:
                if slot != 0:
                    yield f"the task reads {of} slot {slot} and does not record which tokens it holds ({of}_tokens)"
                continue
            count, capacity = recorded.count, held_HS.shape[1]
            if not rows <= count <= capacity:
                yield f"the task records {count} tokens of {of} slot {slot}, but reads {rows} rows of its {capacity}"
                continue
            tokens = recorded.expand(0)
            unit = self.heads.unit if of == "q" else 1
            first_head, remainder = divmod(recorded.first_head, unit)
            if remainder or (tokens >= len(first_heads[of])).any():
                yield f"the task records tokens or heads of {of} slot {slot} that do not exist"
                continue
            heads_H1 = np.arange(first_head, first_head + len(held_HS))[:, None]
            expected_HS = first_heads[of][tokens] + (heads_H1 << ROW_BITS)
            differs = (held_HS[:, : len(tokens)] != expected_HS).any(axis=0)
            if differs.any():
                row = int(np.flatnonzero(differs)[0])
                recorded_row = f"token {tokens[row]} of head {recorded.first_head}"
                yield f"row {row} of {of} slot {slot} does not hold what the task records: {recorded_row}"


def first_head_ids(layout: Layout, heads: int) -> Ints:
    """Return, for each token, the id of its first head in slot 0 of its owner."""
    counts = np.array(layout.counts)
    owner = np.repeat(np.arange(layout.world), counts)
    row = np.arange(layout.length) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = np.empty(layout.length, dtype=np.int64)
    ids[layout.order()] = ((owner * heads) << ROW_BITS) + row
    return ids
