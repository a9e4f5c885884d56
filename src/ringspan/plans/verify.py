"""Check a plan from its data, by simulating the programs of all ranks in lock-step with integer ids in place of
tensors.

There are five checks.

*Messages*: in every step the sends from rank a to rank b match the receives of b from a, in order, kind and shape. No
send is left over, the phase has this kind, and the rows and heads of every transfer lie in its slot.

*Contents*: every (row, head) of a slot holds the id of its content: owner rank, head and row. Transfers copy ids. So
the bands of a task can be converted to the owners' rows and compared with the mask. Every visible pair must be computed
exactly once for every query head, with the key head that it shares.

*Flow*: every row of an owner has a random 64-bit factor. Every task adds a random weight to all rows of each of its
bands, per head, times the factors of these rows, and transfers of outputs and gradients add what they carry. In the end
each owner must hold the sum of all that was added to its rows: nothing is lost, counted twice or added to another row.
This check is randomised, with a fixed seed: an error passes with negligible probability.

*Races*: while messages are in flight, no rows are overwritten that a task or a send reads, and no two receives
overwrite the same rows. Nothing is received over the local rows of slot 0. No output or gradient is sent while a task
or a receive adds to it.

*Tokens*: the tokens and heads that a task records for its slots are those that the transfers deliver.

A result that is sent complete is copied to the rows of its owner: nothing else may be added to these rows, before or
after.

The backward pass begins with the contents of the slots that are kept. Their queries must have complete outputs, nothing
may overwrite them, and a task may read only rows whose upstream gradient has arrived.

Legend: H heads, S rows of a slot.
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
from ringspan.plans.data import (
    OVERWRITES,
    PHASES,
    Phase,
    RankPlan,
    Side,
    Slot,
    Step,
    Task,
    Transfer,
    completed_exchanges,
    side,
)
from ringspan.plans.expected_weights import ExpectedWeights, add_weights
from ringspan.plans.problem import Rows, union
from ringspan.plans.symbolic_slots import NOTHING, ROW_BITS, Heads, Ints, SymbolicSlots, first_head_ids, heads_of


class ComputedBands(NamedTuple):
    """Bands that were computed, in the owners' rows, each for one query head and one key head.

    ``q_owner_head`` is ``rank * heads + head`` of the owner, and ``k_owner_head`` likewise.
    """

    q_owner_head: Ints
    k_owner_head: Ints
    bands: Table


def verify(plans: Sequence[RankPlan]) -> None:
    """Verify the plans of all ranks of a world, given in order. Raises :class:`PlanError` for the first check that
    fails."""
    first = plans[0]
    if [p.rank for p in plans] != list(range(first.world)) or len({p.digest for p in plans}) != 1:
        raise PlanError(f"verify needs the plans of all {first.world} ranks, in rank order and with equal digests")
    depths = {p.program.in_flight for p in plans}
    if len(depths) != 1 or min(depths) < 1:
        raise PlanError(f"all ranks must keep the same number of exchanges in flight, at least 1; the programs say {depths}")
    for p in plans:
        _check_slot_0(p)
    heads = heads_of(plans)
    slots = [SymbolicSlots(plan, heads) for plan in plans]
    for phase in PHASES:
        if phase == "backward":
            slots = [SymbolicSlots(plan, heads, forward) for plan, forward in zip(plans, slots, strict=True)]
        simulation = _Simulation(slots, heads, phase)
        simulation.run()
        _check_computed(first, heads, simulation.computed, phase)
        if simulation.wrong_tokens:
            raise PlanError(simulation.wrong_tokens[0])


def _check_slot_0(plan: RankPlan) -> None:
    """Raise unless slot 0 holds the rank's own tokens, with all heads."""
    for of, slots, rows in (("q", plan.program.q_slots, plan.q_rows), ("kv", plan.program.kv_slots, plan.kv_rows)):
        if not slots or slots[0] != Slot(rows=rows):
            raise PlanError(f"rank {plan.rank}: {of} slot 0 must hold the rank's own {rows} rows, all heads, and is never kept")


Message = NDArray[np.generic]
MessagesByPair = dict[tuple[int, int], list[tuple[Transfer, Message]]]


class _Simulation:
    """The programs of all ranks for one phase, run in lock-step.

    ``computed`` are the bands that the ranks have computed, and ``wrong_tokens`` the errors of tasks whose recorded
    tokens differ from the content of their slots.
    """

    def __init__(self, ranks: Sequence[SymbolicSlots], heads: Heads, phase: Phase) -> None:
        self.phase, self.heads, self.ranks = phase, heads, ranks
        plans = [r.plan for r in ranks]
        self.computed: list[ComputedBands] = []
        self.wrong_tokens: list[str] = []
        self._first_heads: dict[Side, Ints] = {
            "q": first_head_ids(plans[0].q_layout, heads.q),
            "kv": first_head_ids(plans[0].kv_layout, heads.kv),
        }
        self._rng = np.random.default_rng(0)
        self._results = ("out",) if phase == "forward" else ("dq", "dkv")
        self._expected = {
            "q": ExpectedWeights([p.q_rows for p in plans], heads.q, self._rng),
            "kv": ExpectedWeights([p.kv_rows for p in plans], heads.kv, self._rng),
        }

    def run(self) -> None:
        programs = [r.plan.program.steps(self.phase) for r in self.ranks]
        count, depth = max(map(len, programs)), self.ranks[0].plan.program.in_flight
        in_flight: dict[int, MessagesByPair] = {}
        for n in range(count):
            steps = [program[n : n + depth] for program in programs]
            in_flight[n] = self._send(n, steps)
            self._compute(n, steps)
            for arriving in completed_exchanges(n, count, depth):
                self._receive(arriving, [program[arriving : arriving + 1] for program in programs], in_flight.pop(arriving))
        self._check_results()
        if self.phase == "forward":
            self._check_kept()

    def _where(self, n: int, r: SymbolicSlots) -> str:
        return f"{self.phase} step {n} on rank {r.plan.rank}"

    def _send(self, n: int, steps: Sequence[Sequence[Step]]) -> MessagesByPair:
        """Check the transfers of a step, and return its messages by (sender, receiver), in order.

        ``steps`` has, for each rank, this step and those that begin while its messages are in flight.
        """
        in_flight: MessagesByPair = {}
        for r, window in zip(self.ranks, steps, strict=True):
            where = self._where(n, r)
            for step in window:
                for t in (*step.sends, *step.recvs):
                    r.check(t, where)
                if self.phase == "backward":
                    r.check_kept(step, where)
            _check_races(r, window, where)
            for t in (t for step in window[:1] for t in step.sends):
                in_flight.setdefault((r.plan.rank, t.peer), []).append((t, r.read(t, where).copy()))
        return in_flight

    def _compute(self, n: int, steps: Sequence[Sequence[Step]]) -> None:
        for r, window in zip(self.ranks, steps, strict=True):
            where = self._where(n, r)
            for task in (task for step in window[:1] for task in step.tasks):
                self.computed += _bands_at_owners(r, task, where)
                add_weights(r, task, self._results, self._expected, self._rng, where)
                self.wrong_tokens += [f"{where}: {wrong}" for wrong in r.wrong_tokens(task, self._first_heads)]

    def _receive(self, n: int, steps: Sequence[Sequence[Step]], in_flight: MessagesByPair) -> None:
        for r, window in zip(self.ranks, steps, strict=True):
            where = self._where(n, r)
            for t in (t for step in window for t in step.recvs):
                queue = in_flight.get((t.peer, r.plan.rank))
                if not queue:
                    raise PlanError(
                        f"{where}: receives {t.what} from rank {t.peer}, which has no further send to it in this step"
                    )
                sent, message = queue.pop(0)
                what = sent.what
                if (what, message.shape) != (t.what, r.shape(t)):
                    expected, came = _size(r.shape(t), self.heads), _size(message.shape, self.heads)
                    raise PlanError(
                        f"{where}: expects {expected} of {t.what} next from rank {t.peer}, which sends {came} of {what}"
                    )
                if sent.complete != t.complete:
                    raise PlanError(
                        f"{where}: {what} from rank {t.peer} is sent with complete={sent.complete}, but received with "
                        f"complete={t.complete}"
                    )
                r.write(t, message, where)
        for (source, target), queue in in_flight.items():
            if queue:
                raise PlanError(
                    f"{self.phase} step {n}: rank {source} sends {queue[0][0].what} to rank {target}, which does not receive it"
                )

    def _check_results(self) -> None:
        """Raise unless every owner holds the whole of its outputs or gradients, once."""
        for r in self.ranks:
            for what in self._results:
                wrong_rows = (r.weights[what][0] != self._expected[side(what)].of(r.plan.rank)).any(axis=0)
                if wrong_rows.any():
                    row = int(np.flatnonzero(wrong_rows)[0])
                    raise PlanError(
                        f"{self.phase}: the {what} of local row {row} on rank {r.plan.rank} is incomplete or counted twice "
                        "after the last step"
                    )

    def _check_kept(self) -> None:
        """Raise unless every row that is kept for the backward pass has arrived, with the complete output of a query."""
        for r in self.ranks:
            for of, slots in (("q", r.plan.program.q_slots), ("kv", r.plan.program.kv_slots)):
                for n in (n for n, slot in enumerate(slots) if slot.kept):
                    ids = r.ids[of][n]
                    if (ids == NOTHING).any():
                        raise PlanError(f"forward: rank {r.plan.rank} keeps rows of {of} slot {n} that hold nothing")
                    if of == "q" and (r.weights["out"][n] != self._expected["q"].at(ids)).any():
                        raise PlanError(f"forward: rank {r.plan.rank} keeps q slot {n}, whose outputs are not complete")


def _size(shape: tuple[int, ...], heads: Heads) -> str:
    return f"{shape[1]} rows" if heads == (1, 1, 1) else f"{shape[1]} rows × {shape[0]} heads"


def _check_races(r: SymbolicSlots, steps: Sequence[Step], where: str) -> None:
    """Check the messages of a step, the first, against all that is done while they are in flight: in the step itself
    and in those that follow."""
    tasks = [task for step in steps for task in step.tasks]
    busy = {(what, t.q_slot) for t in tasks for what in ("q", "dout")} | {("kv", t.kv_slot) for t in tasks}
    written = {("out", t.q_slot) for t in tasks} | {("dq", t.q_slot) for t in tasks}
    written |= {("dkv", t.kv_slot) for t in tasks}
    sent_now, sent = _rows_sent(steps[:1]), _rows_sent(steps)
    arriving: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for n, t in ((n, t) for n, step in enumerate(steps) for t in step.recvs):
        # For a receive of a later step, the sends of later steps are checked with the windows of those steps.
        is_sent = _overlap((sent if n == 0 else sent_now).get((t.what, t.slot)), t.rows)
        if t.what in OVERWRITES:
            if t.slot == 0:
                raise PlanError(f"{where}: receives {t.what} into slot 0, which is reserved for the rank's local rows")
            for head in range(*r.span(t)):
                arriving.setdefault((t.what, t.slot, head), []).extend(t.rows)
        if t.what in OVERWRITES and (is_sent or (n == 0 and (t.what, t.slot) in busy)):
            raise PlanError(f"{where}: receives {t.what} into slot {t.slot}, which is in use in the same step")
        if n == 0 and t.what in ("out", "dq", "dkv") and is_sent:
            raise PlanError(f"{where}: adds {t.what} to slot {t.slot} while it is being sent")
    for what, slot in sent_now.keys() & written:
        raise PlanError(f"{where}: sends {what} of slot {slot} while a task still writes it")
    for (of, slot, _), rows in arriving.items():
        if any(stop > start for (_, stop), (start, _) in pairwise(sorted(rows))):
            raise PlanError(f"{where}: two receives of {of} overlap in slot {slot}")


def _rows_sent(steps: Sequence[Step]) -> dict[tuple[str, int], Ints]:
    """Return the ranges of rows that are sent of each slot, disjoint and in order: a row of starts and one of stops."""
    rows: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for t in (t for step in steps for t in step.sends):
        rows.setdefault((t.what, t.slot), set()).update(t.rows)
    ranges = {slot: np.array(sorted(of_slot), dtype=np.int64).reshape(-1, 2).T for slot, of_slot in rows.items()}
    return {slot: np.stack(union(np.zeros_like(start), start, stop)[1:]) for slot, (start, stop) in ranges.items()}


def _overlap(ranges: Ints | None, rows: Rows) -> bool:
    """Return whether any of these rows is in the ranges."""
    if ranges is None:
        return False
    start, stop = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return bool((ranges[1].searchsorted(start, side="right") < ranges[0].searchsorted(stop)).any())


def _bands_at_owners(r: SymbolicSlots, task: Task, where: str) -> list[ComputedBands]:
    """Return a task's bands in the owners' rows, head by head."""
    q_HS, k_HS = r.ids_of(task, where)
    bands = np.array(task.bands, dtype=np.int64).reshape(-1, 6)
    tight = tables.tighten(bands)
    outside = (bands[:, [Q0, K0]] < 0).any() or (bands[:, Q1] > q_HS.shape[1]).any() or (bands[:, K1] > k_HS.shape[1]).any()
    if outside:
        raise PlanError(f"{where}: a band lies outside the rows of its slots")
    if not np.array_equal(tight, bands):
        raise PlanError(f"{where}: the bounds of a band are not minimal (see ringspan.masks.table.tighten)")
    computed = [_split_at_owner_rows(bands, q_ids, k_ids) for q_ids, k_ids in zip(q_HS, k_HS, strict=True)]
    if any((c.q_owner_head == NOTHING).any() or (c.k_owner_head == NOTHING).any() for c in computed):
        raise PlanError(f"{where}: a task reads rows that hold nothing yet")
    return computed


def _split_at_owner_rows(bands: Table, q_ids: Ints, k_ids: Ints) -> ComputedBands:
    """Return the bands, split where rows that are adjacent in a slot are not adjacent at their owner."""
    q_at, q_end, q_owner_head, q_row = _runs(q_ids)
    k_at, k_end, k_owner_head, k_row = _runs(k_ids)
    i, q = tables.overlapping(bands[:, Q0], bands[:, Q1], q_at, q_end)
    band = bands[i]
    band[:, Q0], band[:, Q1] = np.maximum(band[:, Q0], q_at[q]), np.minimum(band[:, Q1], q_end[q])
    j, k = tables.overlapping(band[:, K0], band[:, K1], k_at, k_end)
    band, q = band[j], q[j]
    band[:, K0], band[:, K1] = np.maximum(band[:, K0], k_at[k]), np.minimum(band[:, K1], k_end[k])
    band, kept = tables.tighten_indexed(band)
    q, k = q[kept], k[kept]
    dq, dk = q_row[q] - q_at[q], k_row[k] - k_at[k]
    at_owners = band + np.stack([dq, dq, dk, dk, dk - dq, dk - dq], axis=1)
    return ComputedBands(q_owner_head[q], k_owner_head[k], at_owners)


def _runs(ids: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Find runs of rows that are adjacent at their owner.

    Returns for each run: start and stop in the slot, ``rank * heads + head`` of the owner, start at the owner.
    """
    if not len(ids):
        return ids, ids, ids, ids
    first = np.flatnonzero(np.concatenate([[True], (np.diff(ids) != 1) | (ids[1:] == NOTHING) | (ids[:-1] == NOTHING)]))
    first_ids = ids[first]
    owner_head = np.where(first_ids == NOTHING, NOTHING, first_ids >> ROW_BITS)
    return first, np.append(first[1:], len(ids)), owner_head, first_ids & ((1 << ROW_BITS) - 1)


def _check_computed(plan: RankPlan, heads: Heads, computed: list[ComputedBands], phase: Phase) -> None:
    """Raise unless the computed pairs are the visible pairs, for every query head: no pair twice, none that is masked,
    none missing. Pairs are counted once for each head that ``heads`` distinguishes."""
    world = plan.world
    visible = cut(plan.mask, plan.q_layout.pieces, plan.kv_layout.pieces)
    wanted = np.concatenate(
        [_disjoint_table(visible.q_rank, visible.k_rank, head, visible.bands, world, heads) for head in range(heads.q)]
    )
    parts = [tables.EMPTY]
    for part in computed:
        (q_rank, q_head), (k_rank, k_head) = np.divmod(part.q_owner_head, heads.q), np.divmod(part.k_owner_head, heads.kv)
        mismatched = np.flatnonzero(q_head // heads.shared != k_head)
        if len(mismatched):
            q, k = int(q_head[mismatched[0]]), int(k_head[mismatched[0]])
            raise PlanError(
                f"{phase}: query head {q * heads.unit} is computed with key head {k} instead of {q // heads.shared}"
            )
        parts.append(_disjoint_table(q_rank, k_rank, q_head, part.bands, world, heads))
    done = np.concatenate(parts)
    i, j = tables.overlapping(done[:, Q0], done[:, Q1], done[:, Q0], done[:, Q1])
    i, j = i[i < j], j[i < j]
    twice = tables.tighten(tables.intersect_pairwise(done[i], done[j]))
    if len(twice):
        raise PlanError(f"{phase}: {_pair(plan, heads, twice[0])} is computed twice")
    extra = int(tables.area(done).sum() - tables.area(tables.intersect(done, wanted)).sum())
    if extra:
        raise PlanError(f"{phase}: {extra} masked (query, key) pairs are computed")
    missing = int(tables.area(wanted).sum() - tables.area(done).sum())
    if missing:
        raise PlanError(f"{phase}: {missing} visible (query, key) pairs are not computed")


def _disjoint_table(q_rank: Ints, k_rank: Ints, q_head: Ints | int, bands: Table, world: int, heads: Heads) -> Table:
    """Make one table for all pairs of ranks and all heads. Each (query rank, key rank, head) gets a disjoint range of
    query indices, so that bands of different ones cannot overlap."""
    offset = ((q_rank * world + k_rank) * heads.q + q_head) << ROW_BITS
    out = bands.copy()
    out[:, [Q0, Q1]] += offset[:, None]
    out[:, [LO, HI]] -= offset[:, None]
    return out


def _pair(plan: RankPlan, heads: Heads, band: Ints) -> str:
    index, row = divmod(int(band[Q0]), 1 << ROW_BITS)
    rank_pair, head = divmod(index, heads.q)
    q_rank, k_rank = divmod(rank_pair, plan.world)
    k = max(int(band[K0]), int(band[Q0] + band[LO]))
    of_head = "" if heads == (1, 1, 1) else f" of head {head * heads.unit}"
    return f"query {plan.q_layout.positions(q_rank)[row]} × key {plan.kv_layout.positions(k_rank)[k]}{of_head}"
