"""The engine's generators walked by hand: whatever the driver does within the rules, the result is the same and exact."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringspan as rs
import ringspan.engine
from ringspan.engine import AttentionConfig, forward
from ringspan.kernels import Partial, PartialRows, cpu
from ringspan.transports import PostExchange
from tests.engine.drivers import AtTheLastMoment, FarAhead
from tests.engine.truth import EXACT, case, worst_error
from tests.hypothesis_strategies import layouts, masks
from tests.plans.examples import MASKS, STRATEGIES, all_plans

DRIVERS = {
    "far ahead": lambda: FarAhead(),
    "far ahead, last first": lambda: FarAhead(-1),
    "at the last moment": AtTheLastMoment,
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whatever_the_driver(strategy: str, driver: str) -> None:
    """Round robin for the sake of messages of many ranges of rows."""
    for mask in MASKS.values():
        for layout in ("zigzag", "round_robin"):
            plans = [plan.for_heads(4, 2) for plan in all_plans(mask, 4, strategy, layout)]
            assert worst_error(plans, case(mask), DRIVERS[driver]().run) <= EXACT


@settings(max_examples=40)
@given(data=st.data())
def test_any_mask_on_any_layout(data: st.DataObject) -> None:
    mask = data.draw(masks(max_len=14)).mask
    world = data.draw(st.integers(1, 4))
    layout, kv_layout = data.draw(layouts(mask, world)), data.draw(layouts(mask.transposed, world))
    strategy = data.draw(st.sampled_from(STRATEGIES))
    first = rs.plan(mask, world=world, strategy=strategy, layout=layout, kv_layout=kv_layout).for_heads(4, 2)
    driver = DRIVERS[data.draw(st.sampled_from(sorted(DRIVERS)))]()
    assert worst_error([first.at(rank) for rank in range(world)], case(mask), driver.run) <= EXACT


def test_a_rank_can_be_far_ahead() -> None:
    """Else the tests above would prove less than they say."""
    mask = rs.causal(32)
    driver = FarAhead()
    worst_error(all_plans(mask, 8, "gather(stages=7)", "contiguous"), case(mask), driver.run)
    assert driver.furthest_apart >= 3


# -- what a walk asks for ----------------------------------------------------------------------------------------------


class Watched:
    """The CPU kernel, saying when it is called."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def attend(self, *args: Any, **options: Any) -> Iterator[PartialRows]:
        self.log.append("attend")
        yield from cpu.attend(*args, **options)


def walked_alone(plan: rs.Plan, log: list[str], posts: list[PostExchange]) -> Partial:
    """One rank's forward walk, with whatever bytes lie in its buffers."""
    q, kv = torch.randn(plan.q_rows, 1, 2, 4), torch.randn(plan.kv_rows, 1, 2, 8)
    walk = forward(plan, q, kv, AttentionConfig(kernel=Watched(log), scale=1.0, head_dim=4))  # type: ignore[arg-type]
    answer = None
    try:
        while True:
            request = walk.send(answer)
            log.append(f"post {request.label}" if isinstance(request, PostExchange) else f"wait {request.pending}")
            answer = request.label if isinstance(request, PostExchange) else None
            if isinstance(request, PostExchange):
                posts.append(request)
                for _, tensor in request.recvs:
                    tensor.zero_()
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def test_it_computes_while_messages_travel() -> None:
    log: list[str] = []
    walked_alone(rs.plan(rs.full(12), world=3, strategy="ring", layout="contiguous"), log, [])
    assert log == [
        "post forward step 0",
        "attend",
        "wait forward step 0",
        "post forward step 1",
        "attend",
        "wait forward step 1",
        "attend",
    ]


def test_nothing_is_asked_for_where_nothing_travels() -> None:
    log: list[str] = []
    walked_alone(rs.plan(rs.causal(12), world=1), log, [])
    walked_alone(rs.plan(rs.documents([4, 4, 4]), world=3, layout="contiguous", strategy="exchange"), log, [])
    assert log == ["attend", "attend"]


def test_a_ring_sends_rows_as_they_lie_and_passes_on_what_it_got() -> None:
    posts: list[PostExchange] = []
    walked_alone(rs.plan(rs.full(12), world=4, strategy="ring", layout="contiguous"), [], posts)
    for before, after in pairwise(posts):
        assert before.recvs[0][1].data_ptr() == after.sends[0][1].data_ptr()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_posts_are_the_transfers_of_the_plan(strategy: str) -> None:
    plan = rs.plan(rs.causal(24), world=4, rank=1, strategy=strategy, layout="zigzag").for_heads(2, 2)
    posts: list[PostExchange] = []
    walked_alone(plan, [], posts)
    steps = [step for step in plan.program.forward if step.sends or step.recvs]
    assert len(posts) == len(steps)
    for post, step in zip(posts, steps, strict=True):
        assert [(peer, len(x)) for peer, x in post.sends] == [(t.peer, t.count) for t in step.sends if t.peer != 1]
        assert [(peer, len(x)) for peer, x in post.recvs] == [(t.peer, t.count) for t in step.recvs if t.peer != 1]


# -- no I/O in it ------------------------------------------------------------------------------------------------------

ENGINE = sorted(Path(ringspan.engine.__file__).parent.glob("*.py"))

# What the engine uses of the transports: the requests that it yields. A plan handle holds a transport and runs the handshake.
REQUESTS = {"PostExchange", "WaitExchange", "RankGenerator"}
HANDSHAKE = {"ProcessGroupTransport", "RankSignature", "check_agreement", "digest_as_int64", "report_invalid_inputs"}
HANDSHAKE |= {"DTYPES", "NO_SCORE_MOD", "VERSION", "Agreements", "agreements"}


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.name)
def test_the_engine_does_no_io(path: Path) -> None:
    """It imports no torch.distributed, starts no thread or process and opens no file."""
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert [name for name in imported if name.startswith(("torch.distributed", "socket", "threading", "subprocess", "os"))] == (
        ["threading.Lock"] if path.name == "handles.py" else []
    )
    of_transports = {name.rpartition(".")[2] for name in imported if name.startswith("ringspan.transports")}
    assert of_transports <= (HANDSHAKE if path.name == "handles.py" else REQUESTS)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "distributed"]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in ("open", "print")]
