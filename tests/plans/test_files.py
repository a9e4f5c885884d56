"""Plans as JSON: written and read back, and a table of malformed files, each with the name of the wrong field."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.planner import Plan
from tests.hypothesis_strategies import layouts, masks
from tests.plans.examples import MASKS, STRATEGIES, all_plans, layouts_for


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
def test_round_trip(name: str, strategy: str) -> None:
    for layout in layouts_for(MASKS[name]):
        for plan in all_plans(MASKS[name], 3, strategy, layout):
            back = Plan.from_json(plan.to_json())
            assert back == plan
            assert (back.digest, back.mask.digest, back.notes) == (plan.digest, plan.mask.digest, plan.notes)
            assert (back.mask.name, back.q_layout.name, back.kv_layout.name) == (
                plan.mask.name,
                plan.q_layout.name,
                plan.kv_layout.name,
            )
            assert back.to_json() == plan.to_json()


@given(data=st.data())
def test_round_trip_of_any_plan(data: st.DataObject) -> None:
    mask = data.draw(masks(max_len=12)).mask
    layout = data.draw(layouts(mask, 3))
    plan = rs.plan(mask, world=3, rank=data.draw(st.integers(0, 2)), layout=layout)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_loaded_plan_can_be_verified_and_explained() -> None:
    plan = Plan.from_json(rs.plan(rs.causal(16), world=4, rank=2).to_json())
    assert plan.verify().explain() == rs.plan(rs.causal(16), world=4, rank=2).explain()


def test_a_file_of_hierarchical_from_before_pieces_is_read() -> None:
    """The text of the strategy had no ``pieces``, which means one piece."""
    plan = rs.plan(rs.documents([9, 4, 20]), world=4, rank=1, strategy="hierarchical(per_node=2, pieces=1)", layout="balanced")
    assert plan.strategy == "hierarchical(per_node=2, pieces=1)"
    read = Plan.from_json(replace(plan, strategy="hierarchical(per_node=2)").to_json())
    assert (read.strategy, read.program) == ("hierarchical(per_node=2)", plan.program)
    read.verify()
    assert read.at(3).program == plan.at(3).program


# -- malformed files ---------------------------------------------------------------------------------------------------


def at(path: str, value: Any) -> Callable[[Any], None]:
    """Set the value at a path such as ``forward.0.sends``, or apply a function to it."""
    *way, last = path.split(".")

    def change(data: Any) -> None:
        for key in way:
            data = data[int(key) if isinstance(data, list) else key]
        key = int(last) if isinstance(data, list) else last
        data[key] = value(data[key]) if callable(value) else value

    return change


def without(path: str) -> Callable[[Any], None]:
    *way, last = path.split(".")

    def change(data: Any) -> None:
        for key in way:
            data = data[int(key) if isinstance(data, list) else key]
        del data[last]

    return change


MALFORMED: list[tuple[Callable[[Any], None], str]] = [
    # missing
    *((without(name), f"plan.{name}: missing") for name in ("digest", "rank", "strategy", "mask", "q_layout", "kv_layout")),
    *((without(name), f"plan.{name}: missing") for name in ("q_slots", "kv_slots", "heads", "forward", "backward", "notes")),
    (without("ringspan_plan"), "plan.ringspan_plan: missing"),
    (without("mask.bands"), "plan.mask.bands: missing"),
    (without("q_layout.spans"), "plan.q_layout.spans: missing"),
    (without("forward.0.tasks"), "plan.forward[0].tasks: missing"),
    (without("forward.0.sends.0.peer"), "plan.forward[0].sends[0].peer: missing"),
    (without("backward.0.tasks.0.kv_slot"), "plan.backward[0].tasks[0].kv_slot: missing"),
    # another version, or a wrong digest
    (
        at("ringspan_plan", 99),
        "plan.ringspan_plan: this ringspan reads version 5, the file has version 99: make the plan again",
    ),
    (at("digest", "0" * 16), "plan.digest: is 0000000000000000, but the plan in the file has digest"),
    (at("strategy", "gather(stages=2)"), "plan.digest: is"),
    # wrong types
    (at("digest", 7), "plan.digest: expected text, got 7"),
    (at("rank", "1"), "plan.rank: expected an integer from 0 to 2, got '1'"),
    (at("rank", True), "plan.rank: expected an integer from 0 to 2, got True"),
    (at("rank", 1.0), "plan.rank: expected an integer from 0 to 2, got 1.0"),
    (at("notes", "text"), "plan.notes: expected a list, got 'text'"),
    (at("notes", [1]), "plan.notes[0]: expected text, got 1"),
    (at("mask", []), "plan.mask: expected an object, got []"),
    (at("forward", {}), "plan.forward: expected a list, got {}"),
    (at("forward.1", None), "plan.forward[1]: expected an object, got None"),
    (at("mask.q_len", "12"), "plan.mask.q_len: expected an integer"),
    (at("mask.bands.0", [0, 1, 2]), "plan.mask.bands[0]: expected a list of 6, got [0, 1, 2]"),
    (at("mask.bands.0.4", 1e300), "plan.mask.bands[0][4]: expected an integer, got 1e+300"),
    (at("mask.bands.0.4", 2**70), "plan.mask.bands[0][4]: expected an integer"),
    (at("kv_layout.spans.0.0", [0, 4]), "plan.kv_layout.spans[0][0]: expected a list of 3, got [0, 4]"),
    (at("forward.0.sends.0.rows", [[0]]), "plan.forward[0].sends[0].rows[0]: expected a list of 2, got [0]"),
    (at("forward.0.tasks.0.bands.0", "band"), "plan.forward[0].tasks[0].bands[0]: expected a list of 6, got 'band'"),
    (at("kv_slots.1.heads", "all"), "plan.kv_slots[1].heads: expected an integer"),
    (at("kv_slots.1.kept", "yes"), "plan.kv_slots[1].kept: expected one of True, False, got 'yes'"),
    (at("heads", 8), "plan.heads: expected a list of 2, got 8"),
    (at("heads", [8, 0]), "plan.heads[1]: expected an integer from 1 to 65536, got 0"),
    (without("forward.1.tasks.0.kv_tokens"), "plan.forward[1].tasks[0].kv_tokens: missing"),
    (at("forward.1.tasks.0.kv_tokens", []), "plan.forward[1].tasks[0].kv_tokens: expected an object, got []"),
    (at("forward.1.tasks.0.kv_tokens.spans.0", [0, 4]), "plan.forward[1].tasks[0].kv_tokens.spans[0]: expected a list of 3"),
    (at("forward.1.tasks.0.kv_tokens.spans.0.2", 0), "plan.forward[1].tasks[0].kv_tokens.spans[0]: expected a span"),
    (at("forward.1.tasks.0.kv_tokens.spans.0.1", 2**40), "kv_tokens.spans[0][1]: expected an integer from 0"),
    (at("forward.1.tasks.0.kv_tokens.first_head", -1), "kv_tokens.first_head: expected an integer from 0"),
    # out of range
    (at("rank", 3), "plan.rank: expected an integer from 0 to 2, got 3"),
    (at("rank", -1), "plan.rank: expected an integer from 0 to 2, got -1"),
    (at("kv_slots.1.rows", -4), "plan.kv_slots[1].rows: expected an integer from 0"),
    (at("forward.0.sends.0.peer", -1), "plan.forward[0].sends[0].peer: expected an integer from 0"),
    (at("forward.0.recvs.0.slot", -2), "plan.forward[0].recvs[0].slot: expected an integer from 0"),
    (at("forward.0.sends.0.rows.0", [3, 1]), "plan.forward[0].sends[0].rows[0]: expected a range [start, stop]"),
    (at("forward.0.sends.0.what", "vk"), "plan.forward[0].sends[0].what: expected one of kv, q, dout, out, dq, dkv, got 'vk'"),
    # invalid masks and layouts
    (at("mask.q_len", -12), "plan.mask.q_len: expected an integer from 0"),
    (at("mask.q_len", 2**40), "plan.mask: q_len must be between 0 and"),
    (at("mask.bands", lambda bands: bands * 2), "plan.mask.bands: bands must be disjoint"),
    (at("mask.bands.0.1", 99), "plan.mask.bands: bands must be disjoint, tight and within 12 × 12"),
    (at("mask.bands.0.0", 12), "plan.mask.bands: bands must be disjoint, tight"),
    (at("q_layout.spans.0.0.0", 1), "plan.q_layout.spans: token 0 has no owner: the spans hold 11 of 12 tokens"),
    (at("q_layout.spans.0.0", [2, 4, 1]), "plan.q_layout.spans: token 2 is owned twice, by rank 0 and by rank 1"),
    (at("q_layout.spans.0.0.2", 0), "plan.q_layout.spans: rank 0: span (0, 2, 0) must have"),
    (at("kv_layout.spans", []), "plan.kv_layout.spans: a layout needs at least one rank"),
    (at("kv_layout.spans", [[]] * 10_000), "plan.kv_layout.spans: a layout has at most 4,096 ranks"),
    (at("q_layout.spans.0.0.1", 2**63 - 1), "plan.q_layout.spans: rank 0: span (0, 9223372036854775807, 1) must end at token"),
    (at("mask.bands", [[0, 2, 0, 12, -1, 11]] * 2000), "plan.mask.bands: 2,000 and 2,000 bands or spans overlap in 4,000,000"),
    (at("mask.rows", 2**31 - 1), "plan.mask.rows: expected an integer from 1 to 16384, got 2147483647"),
    (at("kv_layout.spans", [[[0, 12, 1]]]), "plan.kv_layout: has 1 ranks where q_layout has 3"),
    (at("mask.k_len", 13), "plan.kv_layout.spans: token 12 has no owner: the spans hold 12 of 13 tokens"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED, ids=[message[:60] for _, message in MALFORMED])
def test_a_malformed_file_names_the_field(change: Callable[[Any], None], message: str) -> None:
    data = json.loads(rs.plan(rs.causal(12), world=3, rank=1, strategy="ring", layout="zigzag").to_json())
    change(data)
    with pytest.raises(rs.PlanError) as error:
        Plan.from_json(json.dumps(data))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a plan file: invalid JSON at line 1, column 1. A plan file is the output of plan.to_json()"),
        ("plan", "not a plan file: invalid JSON at line 1, column 1"),
        ('{"ringspan_plan": 1', "not a plan file: invalid JSON at line 1, column 20"),
        ("[" * 100_000, "not a plan file: invalid JSON. A plan file is"),
        ("[]", "plan: expected an object, got []"),
        ("null", "plan: expected an object, got None"),
        ("NaN", "plan: expected an object, got nan"),
        ("{}", "plan.ringspan_plan: missing"),
    ],
)
def test_text_that_is_no_json_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(rs.PlanError) as error:
        Plan.from_json(text)
    assert message in str(error.value)


@given(data=st.data())
def test_a_file_with_anything_in_it_is_a_plan_or_a_plan_error(data: st.DataObject) -> None:
    """Any JSON in any place raises nothing but PlanError."""
    document = json.loads(rs.plan(rs.causal(6), world=2, strategy="exchange", layout="zigzag").to_json())
    spot: Any = document
    while True:
        keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(spot[key], dict | list) or not spot[key] or data.draw(st.booleans()):
            break
        spot = spot[key]
    anything = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=8,
    )
    spot[key] = data.draw(anything)
    text = json.dumps(document)
    with contextlib.suppress(rs.PlanError):
        Plan.from_json(text, trust=True).verify()
    with contextlib.suppress(rs.PlanError):
        assert Plan.from_json(text).program == rs.plan(rs.causal(6), world=2, strategy="exchange", layout="zigzag").program


@pytest.mark.parametrize("text", ['{"ringspan_plan": ' + "1" * 5000 + "}", "[" * 20_000])
def test_numbers_of_many_digits_and_deep_nesting_are_plan_errors(text: str) -> None:
    with pytest.raises(rs.PlanError, match="not a plan file: invalid JSON"):
        Plan.from_json(text)


MIXED = [[[0, 2**17, 2], [2**17, 2**18, 1]], [[1, 2**17, 2]]]
STRIPED = [[[0, 2**20, 2]], [[1, 2**20, 2]]]
CRAFTED = [
    (2**18, MIXED, MIXED, "overlap in 8,590,131,201 places"),
    (2**20, STRIPED, [[[0, 2**19, 1]], [[2**19, 2**20, 1]]], "1,048,578 tokens must be compared one by one"),
    (2**20, [[[0, 2**20, 1]], []], STRIPED, "1,048,577 tokens must be compared one by one"),
]


@pytest.mark.parametrize(("n", "q_spans", "kv_spans", "message"), CRAFTED, ids=["mixed", "striped queries", "striped keys"])
@pytest.mark.parametrize("strategy", ["ring", "exchange(stages=1)", "gather(stages=1)"])
def test_a_small_file_of_costly_layouts_is_refused(n: int, q_spans: Any, kv_spans: Any, message: str, strategy: str) -> None:
    mask, plan = rs.causal(n), rs.plan(rs.causal(64), world=2, strategy="ring", layout="striped")
    q_layout, kv_layout = (rs.Layout(spans, length=n) for spans in (q_spans, kv_spans))
    text = replace(plan, mask=mask, q_layout=q_layout, kv_layout=kv_layout, strategy=strategy).to_json()
    assert len(text) < 2000
    with pytest.raises(rs.LayoutError, match=message):
        Plan.from_json(text)


def test_the_rows_of_a_batch_are_read_by_their_bands() -> None:
    plan = rs.plan(rs.per_row([rs.causal(12), rs.documents([5, 7]), rs.full(12)]), world=2)
    assert Plan.from_json(plan.to_json()) == plan
