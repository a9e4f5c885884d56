"""Strategies that send more than keys, with drivers that deliver messages as early or as late as allowed."""

from __future__ import annotations

import pytest
import torch

import ringspan as rs
from ringspan.engine import slots
from ringspan.planner import bytes_moved
from ringspan.plans.data import PHASES
from ringspan.transports import InProcessTransport
from tests.engine.dense_comparison import EXACT, case, worst_error
from tests.engine.drivers import DeliverAtOnce, DeliverLate
from tests.plans.dense_simulation import assert_exactly_once
from tests.plans.examples import MASKS, all_plans

DRIVERS = {
    "in process": lambda world: InProcessTransport(world),
    "far ahead": lambda _: DeliverAtOnce(),
    "late": lambda _: DeliverLate(),
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("strategy", ["pass_q(stages=1)", "pass_q", "pass_q(stages=4)", "hierarchical(per_node=2)"])
def test_strategies_are_exact_with_every_driver(strategy: str, driver: str) -> None:
    for mask in MASKS.values():
        for layout in ("contiguous", "zigzag", "striped"):
            for world in (1, 2, 3, 5):
                plans = all_plans(mask, world, strategy, layout)
                assert worst_error(plans, case(mask), DRIVERS[driver](world).run) <= EXACT


@pytest.mark.parametrize("max_ranges", [1, 4])
@pytest.mark.parametrize(
    "strategy", ["ring", "exchange(stages=1)", "exchange", "gather(stages=1)", "pass_q", "hierarchical(per_node=2)", "ulysses"]
)
def test_gradients_that_are_added_together_are_exact(monkeypatch: pytest.MonkeyPatch, strategy: str, max_ranges: int) -> None:
    """As on GPUs: the messages of a step are added in one pass, unless they have many ranges of rows."""
    monkeypatch.setattr(slots, "MAX_RANGES", max_ranges)
    monkeypatch.setattr(slots, "ADDED_TOGETHER", {"cpu"})
    if strategy == "ulysses":
        strategy = "ulysses(heads=4, kv_heads=2)"
    for mask in MASKS.values():
        for layout in ("contiguous", "zigzag", "round_robin"):
            for driver in (DeliverAtOnce(), DeliverLate()):
                assert worst_error(all_plans(mask, 4, strategy, layout), case(mask), driver.run) <= EXACT


# As many heads as ranks, more, or fewer. The query heads that share a key head are on one rank, are cut once, or are
# cut on both sides. Also one key head for all.
HEADS = [(4, 4, 4), (3, 3, 2), (8, 2, 4), (6, 3, 2), (10, 2, 3), (4, 2, 3), (5, 1, 3), (2, 1, 5), (1, 1, 2), (4, 2, 1)]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(("heads", "kv_heads", "world"), HEADS)
def test_any_number_of_heads(heads: int, kv_heads: int, world: int, driver: str) -> None:
    for mask in MASKS.values():
        for layout in ("contiguous", "zigzag"):
            plans = all_plans(mask, world, f"ulysses(heads={heads}, kv_heads={kv_heads})", layout)
            given = case(mask, heads=heads, kv_heads=kv_heads)
            assert worst_error(plans, given, DRIVERS[driver](world).run) <= EXACT


@pytest.mark.parametrize("between", ["exchange", "ring"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "per_node", "world"), [(6, 3, 2, 4), (2, 1, 3, 6), (4, 4, 2, 6), (3, 1, 1, 3), (5, 5, 8, 3)]
)
def test_heads_within_a_node_and_keys_between_them(heads: int, kv_heads: int, per_node: int, world: int, between: str) -> None:
    for mask in MASKS.values():
        for layout in ("contiguous", "zigzag", "striped"):
            strategy = f"hybrid(per_node={per_node}, between={between!r}, heads={heads}, kv_heads={kv_heads})"
            plans = all_plans(mask, world, strategy, layout)
            plans[0].verify()
            assert_exactly_once(plans)
            assert worst_error(plans, case(mask, heads=heads, kv_heads=kv_heads), DeliverAtOnce().run) <= EXACT


@pytest.mark.parametrize("strategy", ["pass_q", "ulysses", "hierarchical(per_node=2)", "hybrid(per_node=2)"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_bytes_are_those_of_the_plan(strategy: str, dtype: str) -> None:
    """Transfers of a rank to itself do not count. An output that is sent back is at least float32."""
    mask = rs.documents([9, 14]) | rs.window(left=3, right=1)
    world = rs.LocalWorld(4)
    plans = all_plans(mask, 4, strategy, "zigzag")
    q, k, v = (x.to(getattr(torch, dtype)).requires_grad_() for x in case(mask, heads=6, kv_heads=3)[:3])
    world.run(plans, q, k, v).out.sum().backward()
    shape = rs.Shape(heads=6, kv_heads=3, head_dim=8, v_dim=6, batch=2, dtype=dtype)
    for plan, moved in zip(plans, world.traffic, strict=True):
        (f_out, f_in), (b_out, b_in) = (bytes_moved(plan, shape, phase) for phase in PHASES)
        assert (moved.sent, moved.received) == (f_out + b_out, f_in + b_in)
        assert moved.sent > 0


def test_a_plan_for_other_heads_is_refused() -> None:
    mask = rs.causal(12)
    plans = all_plans(mask, 2, "ulysses(heads=8, kv_heads=2)", "zigzag")
    with pytest.raises(rs.InputError, match=r"a plan for 8 query heads and 2 key heads.*use plan.for_heads\(4, 2\)"):
        worst_error(plans, case(mask, heads=4, kv_heads=2), InProcessTransport(2).run)
