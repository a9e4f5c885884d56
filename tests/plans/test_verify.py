"""``verify`` finds every error in a plan: a table of good plans with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ringspan as rs
from ringspan.masks import Band
from ringspan.planner import Plan
from ringspan.plans import Slot, Step, Task, Transfer, verify
from ringspan.plans.data import PHASES, Phase
from ringspan.plans.slot_tokens import SlotTokens
from tests.plans.examples import all_plans

# -- changing one thing ------------------------------------------------------------------------------------------------

Part = Step | Task | Transfer
Change = Callable[[list[Plan]], None]


def edit(phase: Phase, rank: int, n: int, **lists: Callable[[tuple[Any, ...]], Sequence[Any]]) -> Change:
    """Change the sends, recvs or tasks of a step, each by a function of the old ones."""

    def change(plans: list[Plan]) -> None:
        steps = list(plans[rank].program.steps(phase))
        assert all(getattr(steps[n], name) for name in lists), "the example has nothing to change there"
        steps[n] = replace(steps[n], **{name: tuple(f(getattr(steps[n], name))) for name, f in lists.items()})
        program = replace(plans[rank].program, **{phase: tuple(steps)})
        plans[rank] = replace(plans[rank], program=program)

    return change


def both(*changes: Change) -> Change:
    def change(plans: list[Plan]) -> None:
        for one in changes:
            one(plans)

    return change


def drop(of: tuple[Any, ...]) -> Sequence[Any]:
    return of[1:]


def twice(of: tuple[Any, ...]) -> Sequence[Any]:
    return (*of, of[0])


def drop_dkv(of: tuple[Transfer, ...]) -> Sequence[Transfer]:
    assert any(t.what == "dkv" for t in of)
    return [t for t in of if t.what != "dkv"]


def twice_dkv(of: tuple[Transfer, ...]) -> Sequence[Transfer]:
    return [*of, *(t for t in of if t.what == "dkv")]


def marked(of: tuple[Transfer, ...]) -> Sequence[Transfer]:
    return [replace(t, complete=t.what in ("out", "dq", "dkv")) for t in of]


def to(**fields: Any) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """The first of them with other fields."""
    return lambda of: (replace(of[0], **fields), *of[1:])


def shorter(of: tuple[Transfer, ...]) -> Sequence[Transfer]:
    (start, stop), *more = of[0].rows
    return (replace(of[0], rows=((start, stop - 1), *more)), *of[1:])


def bands(f: Callable[[tuple[Band, ...]], Sequence[Band]]) -> Callable[[tuple[Task, ...]], Sequence[Task]]:
    return lambda of: (replace(of[0], bands=tuple(f(of[0].bands))), *of[1:])


def spans(*given: tuple[int, int, int], first_head: int = 0) -> SlotTokens:
    return SlotTokens(np.array(given), first_head)


def slots(rank: int, **changed: tuple[Slot, ...]) -> Change:
    def change(plans: list[Plan]) -> None:
        plans[rank] = replace(plans[rank], program=replace(plans[rank].program, **changed))

    return change


def earlier(phase: Phase, rank: int, n: int, name: str, *, by: int = 1) -> Change:
    """Move the transfers or tasks of step n to an earlier step."""

    def change(plans: list[Plan]) -> None:
        moved = getattr(plans[rank].program.steps(phase)[n], name)
        edit(phase, rank, n, **{name: lambda _: ()})(plans)
        steps = list(plans[rank].program.steps(phase))
        steps[n - by] = replace(steps[n - by], **{name: getattr(steps[n - by], name) + moved})
        plans[rank] = replace(plans[rank], program=replace(plans[rank].program, **{phase: tuple(steps)}))

    return change


# -- the table ---------------------------------------------------------------------------------------------------------


def a_ring() -> list[Plan]:
    """3 ranks with 4 tokens each; forward, rank r computes its own keys in step 0, then those of r - 1, then of r -
    2."""
    return all_plans(rs.causal(12), 3, "ring", "zigzag")


def an_exchange() -> list[Plan]:
    return all_plans(rs.causal(12), 3, "exchange(stages=2)", "zigzag")


def some_pieces() -> list[Plan]:
    """Rank 1 returns the gradients of rows 0 and 1 of rank 0, and then those of rows 2 and 3."""
    return all_plans(rs.full(8), 2, "exchange(stages=1)", "zigzag")


def a_full_ring() -> list[Plan]:
    return all_plans(rs.full(12), 3, "ring", "contiguous")


def a_long_ring() -> list[Plan]:
    return all_plans(rs.full(12), 4, "ring", "contiguous")


def some_documents() -> list[Plan]:
    return all_plans(rs.documents([6, 6]), 2, "gather", "contiguous")


def some_heads() -> list[Plan]:
    """6 query and 3 key heads on 2 ranks: rank 0 has query heads 0 1 with key head 0 in slots 1, and 2 with 1 in slots
    2."""
    return all_plans(rs.causal(8), 2, "ulysses(heads=6, kv_heads=3)", "contiguous")


def some_queries() -> list[Plan]:
    return all_plans(rs.full(12), 3, "pass_q(stages=1)", "contiguous")


def of_slots_1(of: tuple[Transfer, ...]) -> Sequence[Transfer]:
    """The transfers of the first run of heads of each rank."""
    return [t for t in of if t.slot == 1 or (t.slot == 0 and t.heads in ((0, 2), (3, 4)))]


def kept(rank: int, of: str, slot: int, value: bool = True) -> Change:
    def change(plans: list[Plan]) -> None:
        changed = list(getattr(plans[rank].program, f"{of}_slots"))
        changed[slot] = replace(changed[slot], kept=value)
        slots(rank, **{f"{of}_slots": tuple(changed)})(plans)

    return change


def heads(rank: int, given: tuple[int, int] | None) -> Change:
    def change(plans: list[Plan]) -> None:
        plans[rank] = replace(plans[rank], program=replace(plans[rank].program, heads=given))

    return change


F, B = PHASES

CHANGES: dict[str, tuple[Callable[[], list[Plan]], Change, str]] = {
    # computed pairs
    "a task is missing": (a_ring, edit(F, 1, 1, tasks=drop), "8 visible (query, key) pairs are not computed"),
    "backward too": (a_ring, edit(B, 1, 1, tasks=drop), "backward: 8 visible (query, key) pairs are not computed"),
    "a task is there twice": (a_ring, edit(F, 2, 0, tasks=twice), "is computed twice"),
    "a band is there twice": (a_ring, edit(F, 0, 0, tasks=bands(twice)), "query 0 × key 0 is computed twice"),
    "a band is wider": (
        some_documents,
        edit(F, 1, 0, tasks=bands(lambda of: [of[0]._replace(hi=of[0].hi + 1)])),
        "5 masked (query, key) pairs are computed",
    ),
    "a band is looser than its rectangle": (
        a_ring,
        edit(F, 0, 0, tasks=bands(lambda of: [of[0]._replace(hi=99), *of[1:]])),
        "forward step 0 on rank 0: the bounds of a band are not minimal",
    ),
    "a band is outside its slot": (
        a_full_ring,
        edit(F, 2, 1, tasks=bands(lambda of: [of[0].shifted(0, 1)])),
        "forward step 1 on rank 2: a band lies outside the rows of its slots",
    ),
    "a band is elsewhere in its slot": (
        some_documents,
        edit(F, 0, 0, tasks=bands(lambda of: [Band(0, 5, 1, 6, -3, 1)])),
        "5 masked (query, key) pairs are computed",
    ),
    "a task is too early": (a_full_ring, earlier(F, 1, 2, "tasks", by=2), "a task reads rows that hold nothing yet"),
    "a task has no such slot": (a_ring, edit(F, 0, 1, tasks=to(kv_slot=7)), "slots 0 and 7, which the plan does not have"),
    "a task has no such queries": (a_ring, edit(F, 0, 1, tasks=to(q_slot=1)), "slots 1 and 1, which the plan does not have"),
    # messages
    "a send is missing": (
        a_full_ring,
        edit(F, 0, 0, sends=drop),
        "receives kv from rank 0, which has no further send to it in this step",
    ),
    "a receive is missing": (a_full_ring, edit(F, 1, 1, recvs=drop), "rank 0 sends kv to rank 1, which does not receive it"),
    "sent to another": (a_full_ring, edit(F, 0, 0, sends=to(peer=2)), "step 0 on rank 1: receives kv from rank 0"),
    "sent to a rank that does not exist": (
        a_full_ring,
        edit(F, 0, 0, sends=to(peer=9)),
        "step 0 on rank 1: receives kv from rank 0",
    ),
    "received from another": (a_full_ring, edit(F, 0, 0, recvs=to(peer=1)), "step 0 on rank 0: receives kv from rank 1"),
    "fewer rows are sent": (
        a_full_ring,
        edit(F, 0, 0, sends=shorter),
        "expects 4 rows of kv next from rank 0, which sends 3 rows",
    ),
    "fewer rows are expected": (
        a_full_ring,
        edit(F, 1, 0, recvs=shorter),
        "expects 3 rows of kv next from rank 0, which sends 4",
    ),
    "other rows are sent": (
        an_exchange,
        edit(F, 0, 0, sends=to(rows=((1, 2), (3, 4)))),
        "4 masked (query, key) pairs are computed",
    ),
    "something else is sent": (a_full_ring, edit(F, 0, 0, sends=to(what="q")), "from rank 0, which sends 4 rows of q"),
    "rows that are not there": (a_full_ring, edit(F, 0, 0, sends=to(rows=((2, 6),))), "kv rows ((2, 6),) do not lie in slot 0"),
    "no rows at all": (a_full_ring, edit(F, 0, 0, sends=to(rows=())), "kv rows () do not lie in slot 0"),
    "a slot that is not there": (a_full_ring, edit(F, 1, 0, recvs=to(slot=5)), "do not lie in slot 5"),
    "sent before it arrives": (a_long_ring, earlier(F, 0, 2, "sends", by=2), "sends kv rows of slot 2 that hold nothing yet"),
    "some heads only": (
        a_full_ring,
        edit(F, 0, 0, sends=to(heads=(0, 1))),
        "the plan names heads, but its program does not say how many there are",
    ),
    "gradients in the forward pass": (
        a_full_ring,
        both(edit(F, 0, 0, sends=to(what="dkv")), edit(F, 1, 0, recvs=to(what="dkv"))),
        "forward step 0 on rank 0: moves dkv, which the forward pass does not have",
    ),
    "outputs in the backward pass": (
        some_queries,
        both(edit(B, 0, 2, sends=to(what="out")), *(edit(B, rank, 2, recvs=to(what="out")) for rank in (1, 2))),
        "moves out, which the backward pass does not have",
    ),
    # races
    "overwrites what is read": (
        a_full_ring,
        edit(F, 1, 1, recvs=to(slot=1)),
        "forward step 1 on rank 1: receives kv into slot 1, which is in use in the same step",
    ),
    "overwrites local rows": (a_full_ring, edit(F, 1, 1, recvs=to(slot=0)), "receives kv into slot 0, which is reserved"),
    "two into the same rows": (
        an_exchange,
        both(edit(F, 0, 0, sends=twice), edit(F, 1, 0, recvs=twice)),
        "forward step 0 on rank 1: two receives of kv overlap in slot 1",
    ),
    "sends a gradient too early": (
        a_full_ring,
        both(earlier(B, 0, 2, "sends"), earlier(B, 1, 2, "recvs")),
        "backward step 1 on rank 0: sends dkv of slot 1 while a task still writes it",
    ),
    "adds to what is being sent": (
        a_full_ring,
        edit(B, 1, 2, recvs=lambda of: [replace(t, slot=1) if t.what == "dkv" else t for t in of]),
        "backward step 2 on rank 1: adds dkv to slot 1 while it is being sent",
    ),
    # results at their owners
    "a gradient is not returned": (
        an_exchange,
        both(*(edit(B, rank, 2, sends=drop_dkv, recvs=drop_dkv) for rank in range(3))),
        "backward: the dkv of local row 0 on rank 0 is incomplete or counted twice",
    ),
    "a gradient is returned twice": (
        an_exchange,
        both(*(edit(B, rank, 2, sends=twice_dkv, recvs=twice_dkv) for rank in range(3))),
        "backward: the dkv of local row 0 on rank 0 is incomplete or counted twice",
    ),
    "a gradient is added to other rows": (
        some_pieces,
        edit(B, 0, 2, recvs=lambda of: [of[1], of[0], *of[2:]]),
        "backward: the dkv of local row 0 on rank 0 is incomplete or counted twice",
    ),
    "an output is added to other rows": (
        some_queries,
        edit(F, 0, 2, recvs=lambda of: [replace(of[0], rows=((0, 2), (3, 4), (2, 3))), *of[1:]]),
        "forward: the out of local row 2 on rank 0 is incomplete or counted twice",
    ),
    # heads
    "other query heads are sent": (
        some_heads,
        edit(F, 1, 0, sends=to(heads=(2, 4))),
        "the out of local row 0 on rank 1 is incomplete or counted twice",
    ),
    "another key head is sent": (
        some_heads,
        edit(F, 1, 0, sends=lambda of: [replace(t, heads=(2, 3)) if t.what == "kv" else t for t in of]),
        "is computed with key head 2 instead of",
    ),
    "fewer heads are sent": (
        some_heads,
        edit(F, 1, 0, sends=to(heads=(0, 1))),
        "expects 4 rows × 2 heads of q next from rank 1, which sends 4 rows × 1 heads of q",
    ),
    "heads that are not there": (some_heads, edit(F, 1, 0, sends=to(heads=(5, 7))), "q heads (5, 7) do not lie in slot 0"),
    "results of other heads": (
        some_heads,
        edit(F, 1, 2, recvs=to(heads=(1, 3))),
        "forward step 2 on rank 1: adds out to rows 0 to 4 of slot 0, which have arrived complete",
    ),
    # complete results
    "complete at one end only": (
        some_heads,
        edit(F, 1, 2, sends=to(complete=False)),
        "out from rank 1 is sent with complete=False, but received with complete=True",
    ),
    "a part as a complete result": (
        some_queries,
        both(*(edit(F, rank, 2, sends=marked, recvs=marked) for rank in range(3))),
        "receives complete out for rows 0 to 4, which have a part already",
    ),
    "a part is added to a complete result": (
        some_heads,
        both(
            edit(B, 1, 2, sends=lambda of: [*of, replace(of[0], complete=False)]),
            edit(B, 0, 2, recvs=lambda of: [*of, replace(next(t for t in of if t.peer == 1), complete=False)]),
        ),
        "backward step 2 on rank 0: adds dq to rows 0 to 4 of slot 0, which have arrived complete",
    ),
    "keys as complete results": (
        an_exchange,
        edit(F, 0, 0, sends=to(complete=True)),
        "moves kv as complete, but only results can be: out, dq, dkv",
    ),
    "complete results of other ranks": (
        a_full_ring,
        both(*(edit(B, rank, n, sends=marked, recvs=marked) for rank in range(3) for n in (1, 2))),
        "receives complete dkv into slot",
    ),
    "a run is not computed": (some_heads, edit(F, 0, 1, tasks=drop), "72 visible (query, key) pairs are not computed"),
    "a run is computed twice": (some_heads, edit(F, 0, 1, tasks=twice), "query 0 × key 0 of head 0 is computed twice"),
    "runs that do not go together": (
        some_heads,
        edit(F, 0, 1, tasks=to(kv_slot=2)),
        "query head 0 is computed with key head 1 instead of 0",
    ),
    "heads that do not go together": (
        some_heads,
        edit(F, 0, 1, tasks=to(kv_slot=0)),
        "forward step 1 on rank 0: 2 query heads cannot share 3 key heads evenly",
    ),
    "ranks of other numbers of heads": (some_heads, heads(1, (6, 6)), "the ranks' programs are for different numbers of heads"),
    "of how many heads": (
        some_heads,
        both(*(heads(rank, None) for rank in range(2))),
        "the plan names heads, but its program does not say how many there are",
    ),
    "heads that cannot be shared evenly": (
        some_heads,
        both(*(heads(rank, (6, 4)) for rank in range(2))),
        "the program is for 6 query heads and 4 key heads: they cannot be shared evenly",
    ),
    # tokens
    "other tokens are recorded": (
        a_full_ring,
        edit(F, 1, 1, tasks=to(kv_tokens=spans((4, 8, 1)))),
        "forward step 1 on rank 1: row 0 of kv slot 1 does not hold what the task records: token 4 of head 0",
    ),
    "tokens are recorded in another order": (
        a_full_ring,
        edit(B, 2, 2, tasks=to(kv_tokens=spans((0, 2, 1), (3, 4, 1), (2, 3, 1)))),
        "backward step 2 on rank 2: row 2 of kv slot 2 does not hold what the task records: token 3 of head 0",
    ),
    "fewer tokens are recorded than read": (
        a_full_ring,
        edit(F, 1, 1, tasks=to(kv_tokens=spans((0, 3, 1)))),
        "forward step 1 on rank 1: the task records 3 tokens of kv slot 1, but reads 4 rows of its 4",
    ),
    "more tokens are recorded than there are rows": (
        a_full_ring,
        edit(F, 1, 1, tasks=to(kv_tokens=spans((0, 5, 1)))),
        "forward step 1 on rank 1: the task records 5 tokens of kv slot 1, but reads 4 rows of its 4",
    ),
    "tokens beyond the sequence are recorded": (
        a_full_ring,
        edit(F, 1, 1, tasks=to(kv_tokens=spans((0, 40, 10)))),
        "forward step 1 on rank 1: the task records tokens or heads of kv slot 1 that do not exist",
    ),
    "no tokens are recorded": (
        a_full_ring,
        edit(F, 1, 1, tasks=to(kv_tokens=None)),
        "forward step 1 on rank 1: the task reads kv slot 1 and does not record which tokens it holds (kv_tokens)",
    ),
    "other heads are recorded": (
        some_heads,
        edit(F, 1, 1, tasks=to(q_tokens=spans((0, 8, 1), first_head=1))),
        "forward step 1 on rank 1: row 0 of q slot 1 does not hold what the task records: token 0 of head 1",
    ),
    # slots
    "slot 0 is too small": (
        a_ring,
        slots(1, kv_slots=(Slot(rows=3), Slot(rows=4), Slot(rows=4))),
        "rank 1: kv slot 0 must hold",
    ),
    "there is no slot 0": (a_ring, slots(0, q_slots=()), "rank 0: q slot 0 must hold the rank's own 4 rows"),
    "slot 0 has some heads": (
        a_ring,
        slots(2, q_slots=(Slot(rows=4, heads=1),)),
        "rank 2: q slot 0 must hold the rank's own 4",
    ),
    "slot 0 is kept": (a_ring, slots(2, q_slots=(Slot(rows=4, kept=True),)), "rank 2: q slot 0 must hold the rank's own 4"),
    # rows that are kept for the backward pass
    "dout of other heads is sent": (
        some_heads,
        edit(B, 1, 0, sends=to(heads=(2, 4))),
        "backward step 1 on rank 0: a task reads rows of q slot 1 without their dout",
    ),
    "dout is not sent": (
        some_heads,
        both(*(edit(B, rank, 0, sends=of_slots_1, recvs=of_slots_1) for rank in range(2))),
        "backward step 1 on rank 0: a task reads rows of q slot 2 without their dout",
    ),
    "dout in the forward pass": (
        some_heads,
        edit(F, 0, 0, sends=to(what="dout")),
        "dout, which the forward pass does not have",
    ),
    "dout of queries that are not kept": (
        some_heads,
        kept(0, "q", 1, False),
        "backward step 0 on rank 0: moves dout of slot 1, whose queries are not kept",
    ),
    "keys that are not kept": (
        some_heads,
        kept(0, "kv", 1, False),
        "backward step 1 on rank 0: a task reads rows that hold nothing yet",
    ),
    "kept queries are sent again": (
        some_heads,
        edit(B, 0, 0, recvs=to(what="q")),
        "backward step 0 on rank 0: moves q of slot 1, which is kept: only its dout can be sent",
    ),
    "kept keys are overwritten": (a_full_ring, kept(1, "kv", 1), "rank 1: receives kv into slot 1, which is kept"),
    "kept outputs are incomplete": (some_queries, kept(0, "q", 1), "rank 0 keeps q slot 1, whose outputs are not complete"),
    "kept rows hold nothing": (
        some_heads,
        lambda plans: slots(0, kv_slots=(*plans[0].program.kv_slots[:2], Slot(rows=9, heads=1, kept=True)))(plans),
        "forward: rank 0 keeps rows of kv slot 2 that hold nothing",
    ),
    "a slot is too small": (a_ring, slots(1, kv_slots=(Slot(rows=4), Slot(rows=3), Slot(rows=4))), "do not lie in slot 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_found(name: str) -> None:
    good, change, message = CHANGES[name]
    plans = good()
    verify(plans)
    change(plans)
    with pytest.raises(rs.PlanError) as error:
        verify(plans)
    assert message in str(error.value)


def test_a_loaded_plan_is_verified_with_newly_made_plans_of_the_other_ranks() -> None:
    plans = a_ring()
    edit(F, 1, 1, tasks=drop)(plans)
    assert Plan.from_json(plans[0].to_json()).verify()
    with pytest.raises(rs.PlanError, match="the program in the file is not the one that ring makes"):
        Plan.from_json(plans[1].to_json())
    with pytest.raises(rs.PlanError, match=r"8 visible \(query, key\) pairs are not computed"):
        Plan.from_json(plans[1].to_json(), trust=True).verify()


@pytest.mark.parametrize(
    "given",
    [
        lambda plans: plans[:2],
        lambda plans: plans[::-1],
        lambda plans: [plans[0], *all_plans(rs.causal(12), 3, "gather", "zigzag")[1:]],
    ],
)
def test_verify_needs_all_ranks_in_order_and_with_equal_digests(given: Callable[[list[Plan]], list[Plan]]) -> None:
    with pytest.raises(rs.PlanError, match="verify needs the plans of all 3 ranks, in rank order and with equal digests"):
        verify(given(a_ring()))


def test_a_slot_may_send_some_rows_while_others_arrive() -> None:
    """Rows that are forwarded share a slot with those that arrive, but no row is sent while it is overwritten."""
    plans = all_plans(rs.causal(64), 4, "hierarchical(per_node=2, pieces=2)", "contiguous")
    verify(plans)
    for rank, plan in enumerate(plans):
        for n, step in enumerate(plan.program.forward):
            sent = {t.slot: t.rows for t in step.sends if t.what == "kv" and t.slot != 0}
            for i, t in enumerate(step.recvs):
                if t.what == "kv" and t.slot in sent:
                    changed = list(plans)
                    onto_sent = replace(t, rows=sent[t.slot])
                    recvs = (*step.recvs[:i], onto_sent, *step.recvs[i + 1 :])
                    edit("forward", rank, n, recvs=lambda _, recvs=recvs: recvs)(changed)
                    with pytest.raises(rs.PlanError, match=f"receives kv into slot {t.slot}, which is in use in the same step"):
                        verify(changed)
                    return
    pytest.fail("no slot sends and receives in one step")
