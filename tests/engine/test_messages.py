"""What of a step's transfers is worked out once, against the transfers themselves."""

from __future__ import annotations

import pickle

import pytest

import ringspan as rs
from ringspan.engine.messages import routes
from ringspan.plans import data
from ringspan.plans.data import PHASES
from tests.plans.examples import MASKS, all_plans

STRATEGIES = ["ring", "gather", "exchange(stages=2)", "pass_q", "ulysses(heads=4, kv_heads=4)", "hierarchical(per_node=2)"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "round_robin"])
def test_every_transfer_is_there_in_its_order(strategy: str, layout: str) -> None:
    for plan in (p for name in ("causal", "documents") for p in all_plans(MASKS[name], 4, strategy, layout)):
        for phase in PHASES:
            for step, route in zip(plan.program.steps(phase), routes(plan, phase), strict=True):
                parcels = [(t.what, t.slot, t.rows, t.heads) for t in route.parcels]
                assert len(set(parcels)) == len(parcels)
                sent = [(peer, *parcels[number]) for peer, number in route.sends]
                assert sent == [(t.peer, t.what, t.slot, t.rows, t.heads) for t in step.sends if t.peer != plan.rank]
                assert list(route.recvs) == [t for t in step.recvs if t.peer != plan.rank]
                assert [way.transfer for way in route.arrivals] == list(step.recvs)
                in_walls = [n for wall in route.walls for n in wall.recvs]
                apart = [way.room for way in route.arrivals if way.room is not None]
                assert sorted([*in_walls, *apart]) == list(range(len(route.recvs)))
                for wall in route.walls:
                    at = wall.start
                    for n, size in zip(wall.recvs, wall.sizes, strict=True):
                        t = route.recvs[n]
                        assert (t.what, t.slot, t.rows) == (wall.what, wall.slot, ((at, at + size),))
                        at += size
                    assert at == wall.stop


def test_what_goes_to_several_is_one_parcel_and_rooms_side_by_side_are_one_wall() -> None:
    plan = rs.plan(rs.full(12), world=4, rank=1, strategy="gather", layout="contiguous")
    (first, *_) = routes(plan, "forward")
    assert len(first.parcels) == 1
    assert sorted(peer for peer, _ in first.sends) == [0, 2, 3]
    (wall,) = first.walls
    assert wall[:5] == ("kv", 1, 0, 9, (3, 3, 3))
    assert [first.recvs[n].peer for n in wall.recvs] == [0, 2, 3]


def test_a_plan_remembers_them_and_does_not_take_them_along() -> None:
    plan = rs.plan(rs.causal(12), world=2, rank=0)
    assert plan.derived(routes, "forward") is plan.derived(routes, "forward")
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert "_derived" not in vars(copy)


def test_a_plan_does_not_remember_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MOST_DERIVED", 3)
    plan = rs.plan(rs.causal(12), world=2, rank=0)
    found = [plan.derived(lambda plan, n: [n], n) for n in range(10)]
    assert found == [[n] for n in range(10)]
    assert len(plan._derived) <= 3
