"""Plans with random changes: those that ``verify`` accepts are correct by counting pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.masks import Band
from ringspan.planner import Plan
from ringspan.plans import Transfer, verify
from ringspan.plans.data import PHASES
from tests.plans.dense_simulation import assert_exactly_once
from tests.plans.examples import all_plans

SOME = ["ring", "gather", "exchange", "pass_q", "ulysses(heads=4, kv_heads=2)", "hierarchical(per_node=2)"]


@st.composite
def changed(draw: st.DrawFn) -> list[Plan]:
    """A good plan with one number in it changed, or one thing left out, doubled, or moved to another step."""
    mask = draw(st.sampled_from([rs.causal(9), rs.documents([4, 5]), rs.full(8), rs.causal(8) & rs.window(left=2)]))
    strategy = draw(st.sampled_from(SOME))
    plans = all_plans(mask, 3, strategy, draw(st.sampled_from(["contiguous", "zigzag", "striped"])))
    rank = draw(st.integers(0, 2))
    phase = draw(st.sampled_from(PHASES))
    steps = list(plans[rank].program.steps(phase))
    places = [(n, name) for n, step in enumerate(steps) for name in ("sends", "recvs", "tasks") if getattr(step, name)]
    if not places:
        return plans
    n, name = draw(st.sampled_from(places))
    items = list(getattr(steps[n], name))
    i = draw(st.integers(0, len(items) - 1))
    how = draw(st.sampled_from(["drop", "twice", "move", "number"]))
    if how == "drop":
        del items[i]
    elif how == "twice":
        items.append(items[i])
    elif how == "move":
        m = draw(st.integers(0, len(steps) - 1))
        moved = items.pop(i)
        if m == n:
            items.append(moved)
        else:
            steps[m] = replace(steps[m], **{name: (*getattr(steps[m], name), moved)})
    else:
        items[i] = draw(other_numbers(items[i]))
    steps[n] = replace(steps[n], **{name: tuple(items)})
    plans[rank] = replace(plans[rank], program=replace(plans[rank].program, **{phase: tuple(steps)}))
    return plans


@st.composite
def other_numbers(draw: st.DrawFn, part: Any) -> Any:
    by = draw(st.sampled_from([-1, 1]))
    if isinstance(part, Transfer):
        field = draw(st.sampled_from(["peer", "slot", "start", "stop", *(["heads"] if part.heads else [])]))
        if field == "heads":
            first, last = part.heads or (0, 0)
            return replace(part, heads=draw(st.sampled_from([(first + by, last), (first, last + by), (first + by, last + by)])))
        if field in ("peer", "slot"):
            return replace(part, **{field: max(0, getattr(part, field) + by)})
        rows = [list(pair) for pair in part.rows]
        rows[draw(st.integers(0, len(rows) - 1))][field == "stop"] += by
        return replace(part, rows=tuple((max(0, a), b) for a, b in rows))
    field = draw(st.sampled_from(["q_slot", "kv_slot", *Band._fields]))
    if field in ("q_slot", "kv_slot"):
        return replace(part, **{field: max(0, getattr(part, field) + by)})
    given = list(part.bands)
    i = draw(st.integers(0, len(given) - 1))
    given[i] = given[i]._replace(**{field: getattr(given[i], field) + by})
    return replace(part, bands=tuple(given))


@given(plans=changed())
def test_plans_that_pass_verify_are_right(plans: list[Plan]) -> None:
    try:
        verify(plans)
    except rs.PlanError:
        return
    assert_exactly_once(plans)
