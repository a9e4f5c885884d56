"""Every strategy on every layout: checked by ``verify`` and counted pair by pair, which checks ``verify`` as well."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan import strategies as built_in
from ringspan.strategies import STRATEGIES as BUILT_IN
from tests.hypothesis_strategies import layouts, masks
from tests.plans.dense_simulation import assert_exactly_once
from tests.plans.examples import LAYOUTS, MASKS, STRATEGIES, all_plans, layouts_for


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_pair_exactly_once(strategy: str, layout: str) -> None:
    for mask in MASKS.values():
        if layout in layouts_for(mask):
            for world in range(1, 9):
                plans = all_plans(mask, world, strategy, layout)
                plans[world // 2].verify()
                assert_exactly_once(plans)


@st.composite
def strategies(draw: st.DrawFn, world: int) -> str:
    """Any built-in strategy, with random options."""
    name = draw(st.sampled_from(sorted(BUILT_IN)))
    kv_heads = draw(st.integers(1, 3))
    values = {
        "stages": draw(st.integers(1, 6)),
        "per_node": draw(st.sampled_from([n for n in range(1, world + 2) if name != "hybrid" or world % n == 0])),
        "between": draw(st.sampled_from(["exchange", "ring"])),
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
    }
    options = {f.name: values.get(f.name, f.default) for f in fields(BUILT_IN[name])}
    return f"{name}({', '.join(f'{option}={value!r}' for option, value in options.items())})"


@given(data=st.data())
def test_any_mask_on_any_layout(data: st.DataObject) -> None:
    mask = data.draw(masks(max_len=16)).mask
    world = data.draw(st.integers(1, 5))
    q_layout = data.draw(layouts(mask, world))
    kv_layout = data.draw(layouts(mask.transposed, world))
    strategy = data.draw(strategies(world))
    first = rs.plan(mask, world=world, strategy=strategy, layout=q_layout, kv_layout=kv_layout)
    assert_exactly_once([first.verify().at(rank) for rank in range(world)])


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_strategy_is_exported(name: str) -> None:
    kind = BUILT_IN[name].__name__
    for package in (rs, built_in):
        assert kind in package.__all__
        assert getattr(package, kind) is BUILT_IN[name]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_moves_nothing(strategy: str) -> None:
    (plan,) = all_plans(rs.causal(16), 1, strategy, "zigzag")
    assert [len(plan.program.forward), len(plan.program.backward)] == [1, 1]
    assert not any(list(plan.transfers(phase, way)) for phase in ("forward", "backward") for way in ("sends", "recvs"))
    assert plan.area == 16 * 17 // 2


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 5, 8])
def test_more_ranks_than_tokens(world: int, strategy: str) -> None:
    plans = all_plans(rs.causal(2), world, strategy, "contiguous")
    plans[0].verify()
    assert sum(plan.work for plan in plans) == pytest.approx(world)
    assert sum(plan.q_rows == 0 for plan in plans) == world - 2


def test_stages_share_two_slots() -> None:
    mask, world = rs.full(64), 8
    at_once, in_stages = (all_plans(mask, world, f"gather(stages={n})", "contiguous")[0].program for n in (1, 4))
    assert [slot.rows for slot in at_once.kv_slots] == [8, 56]
    assert [slot.rows for slot in in_stages.kv_slots] == [8, 16, 16]
    assert [len(at_once.forward), len(in_stages.forward)] == [2, 5]


@pytest.mark.parametrize("stages", [7, 8, 100])
def test_more_stages_than_peers_are_as_many_as_peers(stages: int) -> None:
    plan = rs.plan(rs.full(64), world=8, strategy=f"gather(stages={stages})", layout="contiguous")
    assert len(plan.program.forward) == 8


def test_the_ring_has_two_slots_for_any_world() -> None:
    for world in (3, 5, 8):
        plan = rs.plan(rs.full(120), world=world, strategy="ring", layout="contiguous")
        assert [slot.rows for slot in plan.program.kv_slots] == [120 // world] * 3
        assert len(plan.program.forward) == world


@pytest.mark.parametrize(("left", "hops"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (63, 7)])
def test_a_block_is_passed_on_only_as_far_as_it_is_seen(left: int, hops: int) -> None:
    """64 tokens on 8 ranks: a window of 8 to the left reaches one rank back, of 9 two."""
    for plan in all_plans(rs.causal(64) & rs.window(left=left), 8, "ring", "contiguous"):
        assert len(plan.program.forward) == hops + 1
        sent = [t.count for t in plan.transfers("forward", "sends")]
        assert sum(sent) <= hops * 8
        plan.verify()
