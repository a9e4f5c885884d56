"""Prove a plan right from its data, by simulating the programs of all ranks with symbols in place of tensors.

There are four proofs.

*Contents*: every head of every row of every slot has the name of what it holds, and transfers copy names. So a task's
bands can be written in the owners' rows and compared with the mask. Every visible pair must be computed exactly once
for every query head, with the key head that it shares.

*Flow*: every task adds a random weight to each row it touches, and transfers of results and gradients add weights. In
the end each owner must hold the sum of all weights that were added to its rows: nothing lost, nothing counted twice.

*Races*: no slot is overwritten while a task or a message of the same step reads it, and no result is sent while a task
still adds to it.

*Tokens*: the tokens and heads that a task records for its slots are those that the transfers deliver.
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
from ringspan.plans.data import PHASES, Phase, RankPlan, Side, Step, Task, side
from ringspan.plans.symbolic_slots import NOTHING, ROW_BITS, Heads, Ints, SymbolicSlots, first_head_names, heads_of


class Cells(NamedTuple):
    """Bands that were computed, in the owners' rows, each for one query head and one key head."""

    q_place: Ints
    k_place: Ints
    bands: Table


def verify(plans: Sequence[RankPlan]) -> None:
    """Verify the plans of all ranks of a world, given in order. Raises :class:`PlanError` for the first proof that
    fails."""
    first = plans[0]
    if [p.rank for p in plans] != list(range(first.world)) or len({p.digest for p in plans}) != 1:
        raise PlanError(f"verify needs the plans of all {first.world} ranks, in order and of one digest")
    for p in plans:
        _check_home(p)
    heads = heads_of(plans)
    for phase in PHASES:
        cells, wrong_tokens = _simulate(plans, heads, phase)
        _check_cells(first, heads, cells, phase)
        if wrong_tokens:
            raise PlanError(wrong_tokens[0])


def _check_home(plan: RankPlan) -> None:
    """Slot 0 must hold the rank's own tokens, with all heads."""
    for of, slots, rows in (("q", plan.program.q_slots, plan.q_rows), ("kv", plan.program.kv_slots, plan.kv_rows)):
        if not slots or slots[0].rows != rows or slots[0].heads is not None:
            raise PlanError(f"rank {plan.rank}: {of} slot 0 must hold the rank's own {rows} rows, all heads of them")


class _ExpectedWeights:
    """The sum of the weights added to each head of each row, by owner: what the owner must have in the end."""

    def __init__(self, rows: Sequence[int], heads: int) -> None:
        self.heads = heads
        self.start = np.concatenate([[0], np.cumsum(np.repeat(rows, heads))])
        self.total = np.zeros(self.start[-1], dtype=np.uint64)

    def add(self, names: Ints, weight: np.uint64) -> None:
        self.total[self.start[names >> ROW_BITS] + (names & ((1 << ROW_BITS) - 1))] += weight

    def of(self, rank: int) -> NDArray[np.uint64]:
        first, last = self.start[rank * self.heads], self.start[(rank + 1) * self.heads]
        return self.total[first:last].reshape(self.heads, -1)


def _simulate(plans: Sequence[RankPlan], heads: Heads, phase: Phase) -> tuple[list[Cells], list[str]]:
    """Run all ranks in step. Returns what they computed, and where a task records other tokens than its slots hold."""
    first_heads: dict[Side, Ints] = {
        "q": first_head_names(plans[0].q_layout, heads.q),
        "kv": first_head_names(plans[0].kv_layout, heads.kv),
    }
    wrong_tokens: list[str] = []
    ranks = [SymbolicSlots(plan, heads) for plan in plans]
    rng = np.random.default_rng(0)
    results = ("out",) if phase == "forward" else ("dq", "dkv")
    due = {
        "q": _ExpectedWeights([p.q_rows for p in plans], heads.q),
        "kv": _ExpectedWeights([p.kv_rows for p in plans], heads.kv),
    }
    cells: list[Cells] = []
    for n in range(max(len(p.program.steps(phase)) for p in plans)):
        mail: dict[tuple[int, int], list[tuple[str, NDArray[np.generic]]]] = {}
        steps = [p.program.steps(phase)[n] if n < len(p.program.steps(phase)) else Step() for p in plans]
        for r, step in zip(ranks, steps, strict=True):
            where = f"{phase} step {n} on rank {r.plan.rank}"
            for t in (*step.sends, *step.recvs):
                r.check(t, where)
            _check_races(r, step, where)
            for t in step.sends:
                mail.setdefault((r.plan.rank, t.peer), []).append((t.what, r.read(t, where).copy()))
        for r, step in zip(ranks, steps, strict=True):
            for task in step.tasks:
                where = f"{phase} step {n} on rank {r.plan.rank}"
                cells += _compute(r, task, where)
                _weigh(r, task, results, due, rng)
                wrong_tokens += [f"{where}: {wrong}" for wrong in r.wrong_tokens(task, first_heads)]
        for r, step in zip(ranks, steps, strict=True):
            for t in step.recvs:
                where = f"{phase} step {n} on rank {r.plan.rank}"
                queue = mail.get((t.peer, r.plan.rank))
                if not queue:
                    raise PlanError(f"{where}: waits for {t.what} from rank {t.peer}, which sends none")
                what, message = queue.pop(0)
                if (what, message.shape) != (t.what, r.shape(t)):
                    expected, came = _size(r.shape(t), heads), _size(message.shape, heads)
                    raise PlanError(f"{where}: expects {expected} of {t.what} from rank {t.peer}, which sends {came} of {what}")
                r.write(t, message)
        for (source, target), queue in mail.items():
            if queue:
                raise PlanError(
                    f"{phase} step {n}: rank {source} sends {queue[0][0]} to rank {target}, which does not receive it"
                )
    for r in ranks:
        for what in results:
            lacking = (r.weights[what][0] != due[side(what)].of(r.plan.rank)).any(axis=0)
            if lacking.any():
                row = int(np.flatnonzero(lacking)[0])
                raise PlanError(f"{phase}: not all {what} of row {row} gets home to rank {r.plan.rank}, or some of it twice")
    return cells, wrong_tokens


def _size(shape: tuple[int, ...], heads: Heads) -> str:
    return f"{shape[1]} rows" if heads == (1, 1, 1) else f"{shape[1]} rows × {shape[0]} heads"


def _check_races(r: SymbolicSlots, step: Step, where: str) -> None:
    busy = {("q", t.q_slot) for t in step.tasks} | {("kv", t.kv_slot) for t in step.tasks}
    written = {("out", t.q_slot) for t in step.tasks} | {("dq", t.q_slot) for t in step.tasks}
    written |= {("dkv", t.kv_slot) for t in step.tasks}
    sent = {(t.what, t.slot) for t in step.sends}
    arriving: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for t in step.recvs:
        if t.what in ("q", "kv"):
            if t.slot == 0:
                raise PlanError(f"{where}: receives {t.what} into slot 0, which is home to the rank's own")
            for head in range(*r.span(t)):
                arriving.setdefault((t.what, t.slot, head), []).extend(t.rows)
        if t.what in ("q", "kv") and (t.what, t.slot) in busy | sent:
            raise PlanError(f"{where}: receives {t.what} into slot {t.slot}, which is in use in the same step")
        if t.what in ("out", "dq", "dkv") and (t.what, t.slot) in sent:
            raise PlanError(f"{where}: adds {t.what} to slot {t.slot} while it is being sent")
    for what, slot in sent & written:
        raise PlanError(f"{where}: sends {what} of slot {slot} while a task still writes it")
    for (of, slot, _), rows in arriving.items():
        if any(stop > start for (_, stop), (start, _) in pairwise(sorted(rows))):
            raise PlanError(f"{where}: receives two {of} into the same rows of slot {slot}")


def _compute(r: SymbolicSlots, task: Task, where: str) -> list[Cells]:
    """A task's bands in the owners' rows, head by head."""
    q_HS, k_HS = r.met(task, where)
    bands = np.array(task.bands, dtype=np.int64).reshape(-1, 6)
    tight = tables.tighten(bands)
    outside = (bands[:, [Q0, K0]] < 0).any() or (bands[:, Q1] > q_HS.shape[1]).any() or (bands[:, K1] > k_HS.shape[1]).any()
    if outside or not np.array_equal(tight, bands):
        raise PlanError(f"{where}: a band lies outside its slots, or is not tight")
    cells = [_cells(bands, q_names, k_names) for q_names, k_names in zip(q_HS, k_HS, strict=True)]
    if any((c.q_place == NOTHING).any() or (c.k_place == NOTHING).any() for c in cells):
        raise PlanError(f"{where}: a task reads rows that hold nothing yet")
    return cells


def _cells(bands: Table, q_names: Ints, k_names: Ints) -> Cells:
    """The bands, cut where rows that are adjacent in a slot are not adjacent at their owner."""
    q_at, q_end, q_place, q_row = _runs(q_names)
    k_at, k_end, k_place, k_row = _runs(k_names)
    i, q = tables.overlapping(bands[:, Q0], bands[:, Q1], q_at, q_end)
    band = bands[i]
    band[:, Q0], band[:, Q1] = np.maximum(band[:, Q0], q_at[q]), np.minimum(band[:, Q1], q_end[q])
    j, k = tables.overlapping(band[:, K0], band[:, K1], k_at, k_end)
    band, q = band[j], q[j]
    band[:, K0], band[:, K1] = np.maximum(band[:, K0], k_at[k]), np.minimum(band[:, K1], k_end[k])
    band, kept = tables.tighten_indexed(band)
    q, k = q[kept], k[kept]
    dq, dk = q_row[q] - q_at[q], k_row[k] - k_at[k]
    return Cells(q_place[q], k_place[k], band + np.stack([dq, dq, dk, dk, dk - dq, dk - dq], axis=1))


def _runs(names: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Runs of rows that are adjacent at their owner: first row and end in the slot, place, first row at the owner."""
    if not len(names):
        return names, names, names, names
    first = np.flatnonzero(np.concatenate([[True], (np.diff(names) != 1) | (names[1:] == NOTHING) | (names[:-1] == NOTHING)]))
    head = names[first]
    place = np.where(head == NOTHING, NOTHING, head >> ROW_BITS)
    return first, np.append(first[1:], len(names)), place, head & ((1 << ROW_BITS) - 1)


def _weigh(
    r: SymbolicSlots,
    task: Task,
    results: Sequence[str],
    due: dict[str, _ExpectedWeights],
    rng: np.random.Generator,
) -> None:
    """Add a random weight to every head of every row that the task touches, and to what its owner must get."""
    for result in results:
        of = side(result)
        slot = task.kv_slot if of == "kv" else task.q_slot
        names_HS = r.names[of][slot]
        for band in task.bands:
            a, b = (band.k0, band.k1) if of == "kv" else (band.q0, band.q1)
            for head, names in enumerate(names_HS[:, a:b]):
                weight = rng.integers(1, 2**62, dtype=np.uint64)
                r.weights[result][slot][head, a:b] += weight
                due[of].add(names, weight)


def _check_cells(plan: RankPlan, heads: Heads, computed: list[Cells], phase: Phase) -> None:
    """What was computed must be what is visible, for every query head: no pair twice, none that is masked, none
    missing."""
    world = plan.world
    seen = cut(plan.mask, plan.q_layout.pieces, plan.kv_layout.pieces)
    wanted = np.concatenate([_apart(seen.q_rank, seen.k_rank, head, seen.bands, world, heads) for head in range(heads.q)])
    parts = [tables.EMPTY]
    for cells in computed:
        (q_rank, q_head), (k_rank, k_head) = np.divmod(cells.q_place, heads.q), np.divmod(cells.k_place, heads.kv)
        mismatched = np.flatnonzero(q_head // heads.shared != k_head)
        if len(mismatched):
            q, k = int(q_head[mismatched[0]]), int(k_head[mismatched[0]])
            raise PlanError(f"{phase}: query head {q * heads.unit} meets key head {k}, not {q // heads.shared}")
        parts.append(_apart(q_rank, k_rank, q_head, cells.bands, world, heads))
    done = np.concatenate(parts)
    i, j = tables.overlapping(done[:, Q0], done[:, Q1], done[:, Q0], done[:, Q1])
    i, j = i[i < j], j[i < j]
    twice = tables.tighten(tables.meet(done[i], done[j]))
    if len(twice):
        raise PlanError(f"{phase}: {_pair(plan, heads, twice[0])} is computed twice")
    extra = int(tables.area(done).sum() - tables.area(tables.intersect(done, wanted)).sum())
    if extra:
        raise PlanError(f"{phase}: {extra} pairs are computed that the mask does not show")
    missing = int(tables.area(wanted).sum() - tables.area(done).sum())
    if missing:
        raise PlanError(f"{phase}: {missing} pairs that the mask shows are not computed")


def _apart(q_rank: Ints, k_rank: Ints, q_head: Ints | int, bands: Table, world: int, heads: Heads) -> Table:
    """One table for all pairs of ranks and all heads. Each has query rows of its own, so that they never overlap."""
    far = ((q_rank * world + k_rank) * heads.q + q_head) << ROW_BITS
    out = bands.copy()
    out[:, [Q0, Q1]] += far[:, None]
    out[:, [LO, HI]] -= far[:, None]
    return out


def _pair(plan: RankPlan, heads: Heads, band: Ints) -> str:
    apart, row = divmod(int(band[Q0]), 1 << ROW_BITS)
    pair, head = divmod(apart, heads.q)
    q_rank, k_rank = divmod(pair, plan.world)
    k = max(int(band[K0]), int(band[Q0] + band[LO]))
    of_head = "" if heads == (1, 1, 1) else f" of head {head * heads.unit}"
    return f"query {plan.q_layout.positions(q_rank)[row]} × key {plan.kv_layout.positions(k_rank)[k]}{of_head}"
