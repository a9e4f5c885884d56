"""Compare the messages of a step with its transfers."""

from __future__ import annotations

import pickle

import pytest

import ringspan as rs
from ringspan.engine.messages import schedule
from ringspan.plans import data
from ringspan.plans.data import PHASES
from tests.plans.examples import MASKS, all_plans

STRATEGIES = ["ring", "gather", "exchange(stages=2)", "pass_q", "ulysses(heads=4, kv_heads=4)", "hierarchical(per_node=2)"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "round_robin"])
def test_messages_have_every_transfer_in_its_order(strategy: str, layout: str) -> None:
    for plan in (p for name in ("causal", "documents") for p in all_plans(MASKS[name], 4, strategy, layout)):
        for phase in PHASES:
            for step, (_, _, tasks, messages) in zip(plan.program.steps(phase), schedule(plan, phase), strict=True):
                assert tasks == step.tasks
                assert (messages is None) == (not step.sends and not step.recvs)
                if messages is None:
                    continue
                payloads = [(t.what, t.slot, t.rows, t.heads) for t, _ in messages.payloads]
                assert len(set(payloads)) == len(payloads)
                sent = [(peer, *payloads[number]) for peer, number in messages.sends]
                assert sent == [(t.peer, t.what, t.slot, t.rows, t.heads) for t in step.sends if t.peer != plan.rank]
                assert list(messages.recvs) == [t for t in step.recvs if t.peer != plan.rank]
                assert messages.is_on_wire == bool(messages.sends or messages.recvs)
                assert [arrival.transfer for arrival in messages.arrivals] == list(step.recvs)
                in_place = [n for run in messages.receive_runs for n in run.recvs]
                buffered = [arrival.buffer for arrival in messages.arrivals if arrival.buffer is not None]
                assert sorted([*in_place, *buffered]) == list(range(len(messages.recvs)))
                for run in messages.receive_runs:
                    at = run.start
                    for n, size in zip(run.recvs, run.sizes, strict=True):
                        t = messages.recvs[n]
                        assert (t.what, t.slot, t.rows) == (run.what, run.slot, ((at, at + size),))
                        at += size
                    assert at == run.stop


def test_rows_for_several_peers_are_one_payload_and_adjacent_receives_one_run() -> None:
    plan = rs.plan(rs.full(12), world=4, rank=1, strategy="gather", layout="contiguous")
    first = schedule(plan, "forward")[0].messages
    assert first is not None
    assert len(first.payloads) == 1
    assert sorted(peer for peer, _ in first.sends) == [0, 2, 3]
    (run,) = first.receive_runs
    assert run[:5] == ("kv", 1, 0, 9, (3, 3, 3))
    assert [first.recvs[n].peer for n in run.recvs] == [0, 2, 3]


def test_a_plan_keeps_its_schedule_but_does_not_pickle_it() -> None:
    plan = rs.plan(rs.causal(12), world=2, rank=0)
    assert plan.derived(schedule, "forward") is plan.derived(schedule, "forward")
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert "_derived" not in vars(copy)


def test_a_plan_keeps_a_bounded_number_of_derived_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "DERIVED_CACHE_SIZE", 3)
    plan = rs.plan(rs.causal(12), world=2, rank=0)
    found = [plan.derived(lambda plan, n: [n], n) for n in range(10)]
    assert found == [[n] for n in range(10)]
    assert len(plan._derived) <= 3
