"""Which global tokens lie in the rows of a slot, and of which heads: for functions that ask where a query or a key stands.

Kernels see rows of slots. What lies there follows from the transfers of all ranks, so all are walked in step, with names in
the place of tensors (:mod:`ringspan.plans.symbolic_slots`) and nothing but queries and keys travelling::

    ring, 3 ranks of 2 tokens: key slots of rank 0, while it computes step …
      0   slot 0: tokens 0 1
      1   slot 1: tokens 4 5        from rank 2
      2   slot 2: tokens 2 3        from rank 1, by way of rank 2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts import Layout
from ringspan.masks import Mask
from ringspan.planner.user_plan import Plan, plan_rank
from ringspan.plans.data import PHASES, Phase, Side, Step
from ringspan.plans.symbolic_slots import NOTHING, ROW_BITS, Ints, SymbolicSlots, heads_of


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What a slot holds: the token of each row (0 where the row holds nothing), and the first of its heads."""

    tokens: Ints
    first_head: int


# For each step, the slots that its tasks read.
Held = tuple[dict[tuple[Side, int], Contents], ...]


def held(plan: Plan, phase: Phase) -> Held:
    """What the slots of this rank hold in each step of a phase, as far as tasks read them.

    >>> from ringspan import causal, plan
    >>> ring = plan(causal(6), world=3, rank=0, strategy="ring", layout="contiguous")
    >>> [contents.tokens.tolist() for contents in held(ring, "forward")[0].values()]
    [[0, 1], [0, 1]]
    """
    return slot_contents(plan.mask, plan.q_layout, plan.kv_layout, plan.strategy, plan.rank)[phase]


@cache_by_digest(32)
def slot_contents(mask: Mask, q_layout: Layout, kv_layout: Layout, strategy: str, rank: int) -> dict[Phase, Held]:
    """:func:`held` of both phases, of what a plan follows from."""
    plans = [plan_rank(mask, q_layout, kv_layout, strategy, r) for r in range(q_layout.world)]
    return {phase: _walk(plans, rank, phase) for phase in PHASES}


def _walk(plans: list[Plan], rank: int, phase: Phase) -> Held:
    heads = heads_of(plans)
    ranks = [SymbolicSlots(plan, heads) for plan in plans]
    found = []
    for n in range(len(plans[rank].program.steps(phase))):
        steps = [p.program.steps(phase)[n] if n < len(p.program.steps(phase)) else Step() for p in plans]
        found.append(_read_by_tasks(ranks[rank], steps[rank]))
        mail: dict[tuple[int, int], list[Ints]] = {}
        for r, step in zip(ranks, steps, strict=True):
            for t in step.sends:
                if t.what in r.names:
                    mail.setdefault((r.plan.rank, t.peer), []).append(r.read(t, f"{phase} step {n}"))  # type: ignore[arg-type]
        for r, step in zip(ranks, steps, strict=True):
            for t in step.recvs:
                if t.what in r.names:
                    r.write(t, mail[t.peer, r.plan.rank].pop(0))
    return tuple(found)


def _read_by_tasks(r: SymbolicSlots, step: Step) -> dict[tuple[Side, int], Contents]:
    slots: set[tuple[Side, int]] = {("q", task.q_slot) for task in step.tasks} | {("kv", task.kv_slot) for task in step.tasks}
    return {(of, slot): _contents(r, of, slot) for of, slot in sorted(slots)}


def _contents(r: SymbolicSlots, of: Side, slot: int) -> Contents:
    """Names as tokens and heads. All heads of a slot hold the same tokens, and are neighbours: that is how heads travel."""
    layout, count, unit = (r.plan.q_layout, r.heads.q, r.heads.unit) if of == "q" else (r.plan.kv_layout, r.heads.kv, 1)
    names_HS = r.names[of][slot]
    there = (names_HS != NOTHING).all(axis=0)
    first, row = names_HS[0, there] >> ROW_BITS, names_HS[0, there] & ((1 << ROW_BITS) - 1)
    owner, head = np.divmod(first, count)
    assert ((names_HS[:, there] >> ROW_BITS) % count == head + np.arange(len(names_HS))[:, None]).all()
    assert (names_HS[:, there] & ((1 << ROW_BITS) - 1) == row).all()
    assert len(np.unique(head)) <= 1
    tokens = np.zeros(names_HS.shape[1], dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(layout.counts)])
    tokens[there] = layout.order()[start[owner] + row]
    tokens.setflags(write=False)
    return Contents(tokens, int(head[0]) * unit if len(head) else 0)
