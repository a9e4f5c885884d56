"""Prove a plan right from its data, by walking all ranks' programs with symbols in the place of tensors.

Three proofs. *Contents*: every row of every slot carries the name of the token it holds, and transfers copy names, so a
task's bands can be said in the owners' rows and compared with the mask: every visible pair exactly once. *Flow*: every
task gives each row it touches a random weight, transfers of results and gradients add weights, and at the end each
owner must hold the sum of all that was given to its rows: nothing lost, nothing twice. *Races*: no
slot is overwritten while a task or a message of the same step reads it, nor are results sent while a task still adds to
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.errors import PlanError
from ringspan.layouts import cut
from ringspan.masks import table as tables
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1, Table
from ringspan.plans.data import PHASES, Phase, Plan, Program, Step, Task, Transfer

Ints = NDArray[np.int64]
NOTHING = -1

# A token's name is its owner and its row there: owner << 32 | row.
OWNER_SHIFT = 32


class Cells(NamedTuple):
    """Bands that were computed, in the owners' rows."""

    q_rank: Ints
    k_rank: Ints
    bands: Table


def verify(plans: Sequence[Plan]) -> None:
    """All ranks' plans of one world, in order. Raises :class:`PlanError` at the first thing that does not hold."""
    first = plans[0]
    if [p.rank for p in plans] != list(range(first.world)) or len({p.digest for p in plans}) != 1:
        raise PlanError(f"verify needs the plans of all {first.world} ranks, in order and of one digest")
    if any(t.heads for p in plans for phase in PHASES for way in ("sends", "recvs") for t in p.transfers(phase, way)):
        raise PlanError("verify cannot yet follow transfers of some heads only")
    for p in plans:
        _check_home(p)
    for phase in PHASES:
        _check_cells(first, _walk(plans, phase), phase)


def _check_home(plan: Plan) -> None:
    """Slot 0 is the rank's own tokens, all heads of them."""
    for of, slots, rows in (("q", plan.program.q_slots, plan.q_rows), ("kv", plan.program.kv_slots, plan.kv_rows)):
        if not slots or slots[0].rows != rows or any(slot.heads is not None for slot in slots):
            raise PlanError(f"rank {plan.rank}: {of} slot 0 must hold the rank's own {rows} rows, and all slots all heads")


class _Rank:
    """One rank's slots, with names and weights in the place of tensors."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        program: Program = plan.program
        self.names = {
            "q": [np.full(slot.rows, NOTHING) for slot in program.q_slots],
            "kv": [np.full(slot.rows, NOTHING) for slot in program.kv_slots],
        }
        self.names["q"][0][:] = (plan.rank << OWNER_SHIFT) + np.arange(plan.q_rows)
        self.names["kv"][0][:] = (plan.rank << OWNER_SHIFT) + np.arange(plan.kv_rows)
        self.weights = {
            what: [np.zeros(len(names), dtype=np.uint64) for names in self.names[of]]
            for what, of in (("out", "q"), ("dq", "q"), ("dkv", "kv"))
        }

    def array(self, t: Transfer, where: str) -> NDArray[np.generic]:
        group = self.names if t.what in self.names else self.weights
        slots: Sequence[NDArray[np.generic]] = group[t.what]
        if not 0 <= t.slot < len(slots) or any(not 0 <= a < b <= len(slots[t.slot]) for a, b in t.rows) or not t.rows:
            raise PlanError(f"{where}: {t.what} rows {t.rows} do not lie in slot {t.slot}")
        return slots[t.slot]

    def read(self, t: Transfer, where: str) -> NDArray[np.generic]:
        array = self.array(t, where)
        rows = np.concatenate([array[a:b] for a, b in t.rows])
        if t.what in self.names and (rows == NOTHING).any():
            raise PlanError(f"{where}: sends {t.what} rows of slot {t.slot} that hold nothing yet")
        return rows

    def write(self, t: Transfer, message: NDArray[np.generic], where: str) -> None:
        array = self.array(t, where)
        at = 0
        for a, b in t.rows:
            part = message[at : at + b - a]
            at += b - a
            if t.what in self.names:
                array[a:b] = part
                for result in ("out", "dq") if t.what == "q" else ("dkv",):
                    self.weights[result][t.slot][a:b] = 0
            else:
                array[a:b] += part  # type: ignore[misc]


def _walk(plans: Sequence[Plan], phase: Phase) -> list[Cells]:
    """Run all ranks in step. Returns what they computed."""
    ranks = [_Rank(plan) for plan in plans]
    rng = np.random.default_rng(0)
    results = ("out",) if phase == "forward" else ("dq", "dkv")
    owed = {
        "q": [np.zeros(p.q_rows, dtype=np.uint64) for p in plans],
        "kv": [np.zeros(p.kv_rows, dtype=np.uint64) for p in plans],
    }
    cells: list[Cells] = []
    for n in range(max(len(p.program.steps(phase)) for p in plans)):
        mail: dict[tuple[int, int], list[tuple[str, NDArray[np.generic]]]] = {}
        steps = [p.program.steps(phase)[n] if n < len(p.program.steps(phase)) else Step() for p in plans]
        for r, step in zip(ranks, steps, strict=True):
            where = f"{phase} step {n} on rank {r.plan.rank}"
            _check_races(step, where)
            for t in step.sends:
                mail.setdefault((r.plan.rank, t.peer), []).append((t.what, r.read(t, where).copy()))
        for r, step in zip(ranks, steps, strict=True):
            for task in step.tasks:
                where = f"{phase} step {n} on rank {r.plan.rank}"
                cells.append(_compute(r, task, where))
                _weigh(r, task, results, owed, rng)
        for r, step in zip(ranks, steps, strict=True):
            for t in step.recvs:
                where = f"{phase} step {n} on rank {r.plan.rank}"
                queue = mail.get((t.peer, r.plan.rank))
                if not queue:
                    raise PlanError(f"{where}: waits for {t.what} from rank {t.peer}, which sends none")
                what, message = queue.pop(0)
                if (what, len(message)) != (t.what, t.count):
                    raise PlanError(
                        f"{where}: expects {t.count} rows of {t.what} from rank {t.peer}, which sends {len(message)} of {what}"
                    )
                r.write(t, message, where)
        for (source, target), queue in mail.items():
            if queue:
                raise PlanError(
                    f"{phase} step {n}: rank {source} sends {queue[0][0]} to rank {target}, which does not receive it"
                )
    for r in ranks:
        for what in results:
            home = r.weights[what][0]
            due = owed["kv" if what == "dkv" else "q"][r.plan.rank]
            if not np.array_equal(home, due):
                row = int(np.flatnonzero(home != due)[0])
                raise PlanError(f"{phase}: not all {what} of row {row} gets home to rank {r.plan.rank}, or some of it twice")
    return cells


def _check_races(step: Step, where: str) -> None:
    busy = {("q", t.q_slot) for t in step.tasks} | {("kv", t.kv_slot) for t in step.tasks}
    written = {("out", t.q_slot) for t in step.tasks} | {("dq", t.q_slot) for t in step.tasks}
    written |= {("dkv", t.kv_slot) for t in step.tasks}
    sent = {(t.what, t.slot) for t in step.sends}
    arriving: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for t in step.recvs:
        if t.what in ("q", "kv"):
            if t.slot == 0:
                raise PlanError(f"{where}: receives {t.what} into slot 0, which is home to the rank's own")
            arriving.setdefault((t.what, t.slot), []).extend(t.rows)
        if t.what in ("q", "kv") and (t.what, t.slot) in busy | sent:
            raise PlanError(f"{where}: receives {t.what} into slot {t.slot}, which is in use in the same step")
        if t.what in ("out", "dq", "dkv") and (t.what, t.slot) in sent:
            raise PlanError(f"{where}: adds {t.what} to slot {t.slot} while it is being sent")
    for what, slot in sent & written:
        raise PlanError(f"{where}: sends {what} of slot {slot} while a task still writes it")
    for (of, slot), rows in arriving.items():
        if any(stop > start for (_, stop), (start, _) in pairwise(sorted(rows))):
            raise PlanError(f"{where}: receives two {of} into the same rows of slot {slot}")


def _compute(r: _Rank, task: Task, where: str) -> Cells:
    """A task's bands in the owners' rows: each band is cut where the rows of a slot stop being neighbours at home."""
    if not 0 <= task.q_slot < len(r.names["q"]) or not 0 <= task.kv_slot < len(r.names["kv"]):
        raise PlanError(f"{where}: a task uses slots {task.q_slot} and {task.kv_slot}, which the plan does not have")
    bands = np.array(task.bands, dtype=np.int64).reshape(-1, 6)
    q_names, k_names = r.names["q"][task.q_slot], r.names["kv"][task.kv_slot]
    tight = tables.tighten(bands)
    outside = (bands[:, [Q0, K0]] < 0).any() or (bands[:, Q1] > len(q_names)).any() or (bands[:, K1] > len(k_names)).any()
    if outside or not np.array_equal(tight, bands):
        raise PlanError(f"{where}: a band lies outside its slots, or is not tight")
    q_at, q_end, q_owner, q_row = _runs(q_names)
    k_at, k_end, k_owner, k_row = _runs(k_names)
    i, q = tables.overlapping(bands[:, Q0], bands[:, Q1], q_at, q_end)
    band = bands[i]
    band[:, Q0], band[:, Q1] = np.maximum(band[:, Q0], q_at[q]), np.minimum(band[:, Q1], q_end[q])
    j, k = tables.overlapping(band[:, K0], band[:, K1], k_at, k_end)
    band, q = band[j], q[j]
    band[:, K0], band[:, K1] = np.maximum(band[:, K0], k_at[k]), np.minimum(band[:, K1], k_end[k])
    band, kept = tables.tighten_indexed(band)
    q, k = q[kept], k[kept]
    if (q_owner[q] == NOTHING).any() or (k_owner[k] == NOTHING).any():
        raise PlanError(f"{where}: a task reads rows that hold nothing yet")
    dq, dk = q_row[q] - q_at[q], k_row[k] - k_at[k]
    return Cells(q_owner[q], k_owner[k], band + np.stack([dq, dq, dk, dk, dk - dq, dk - dq], axis=1))


def _runs(names: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Where rows are neighbours at home: first and last row in the slot, owner, first row at home."""
    if not len(names):
        return names, names, names, names
    first = np.flatnonzero(np.concatenate([[True], (np.diff(names) != 1) | (names[1:] == NOTHING) | (names[:-1] == NOTHING)]))
    head = names[first]
    owner = np.where(head == NOTHING, NOTHING, head >> OWNER_SHIFT)
    return first, np.append(first[1:], len(names)), owner, head & ((1 << OWNER_SHIFT) - 1)


def _weigh(
    r: _Rank, task: Task, results: Sequence[str], owed: dict[str, list[NDArray[np.uint64]]], rng: np.random.Generator
) -> None:
    """Give every row that the task touches a weight, and note to whom it is owed."""
    for result in results:
        of = "kv" if result == "dkv" else "q"
        slot = task.kv_slot if of == "kv" else task.q_slot
        names = r.names[of][slot]
        for band in task.bands:
            a, b = (band.k0, band.k1) if of == "kv" else (band.q0, band.q1)
            weight = rng.integers(1, 2**62, dtype=np.uint64)
            r.weights[result][slot][a:b] += weight
            owner, row = names[a:b] >> OWNER_SHIFT, names[a:b] & ((1 << OWNER_SHIFT) - 1)
            for o in np.unique(owner).tolist():
                owed[of][o][row[owner == o]] += weight


def _check_cells(plan: Plan, computed: list[Cells], phase: Phase) -> None:
    """Computed = visible: nothing twice, nothing else, nothing missing."""
    world = plan.world
    wanted = _apart(Cells(*cut(plan.mask, plan.q_layout.pieces, plan.kv_layout.pieces)), world)
    done = np.concatenate([tables.EMPTY, *(_apart(cells, world) for cells in computed)])
    i, j = tables.overlapping(done[:, Q0], done[:, Q1], done[:, Q0], done[:, Q1])
    i, j = i[i < j], j[i < j]
    twice = tables.tighten(tables.meet(done[i], done[j]))
    if len(twice):
        raise PlanError(f"{phase}: {_pair(plan, twice[0])} is computed twice")
    extra = int(tables.area(done).sum() - tables.area(tables.intersect(done, wanted)).sum())
    if extra:
        raise PlanError(f"{phase}: {extra} pairs are computed that the mask does not show")
    missing = int(tables.area(wanted).sum() - tables.area(done).sum())
    if missing:
        raise PlanError(f"{phase}: {missing} pairs that the mask shows are not computed")


def _apart(cells: Cells, world: int) -> Table:
    """One table for all pairs of ranks, each pair moved to queries of its own so that they never meet."""
    far = (cells.q_rank * world + cells.k_rank) << OWNER_SHIFT
    out = cells.bands.copy()
    out[:, [Q0, Q1]] += far[:, None]
    out[:, [LO, HI]] -= far[:, None]
    return out


def _pair(plan: Plan, band: Ints) -> str:
    pair, row = divmod(int(band[Q0]), 1 << OWNER_SHIFT)
    q_rank, k_rank = divmod(pair, plan.world)
    k = max(int(band[K0]), int(band[Q0] + band[LO]))
    return f"query {plan.q_layout.positions(q_rank)[row]} × key {plan.kv_layout.positions(k_rank)[k]}"
