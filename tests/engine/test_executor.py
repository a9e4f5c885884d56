"""The generators of the executor: results are exact with any driver that meets the contract of the requests."""

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
from ringspan.kernels import PartialRows, cpu
from ringspan.transports import PostExchange
from tests.engine.dense_comparison import EXACT, case, worst_error
from tests.engine.drivers import DeliverAtOnce, DeliverLate
from tests.hypothesis_strategies import layouts, masks
from tests.plans.examples import MASKS, STRATEGIES, all_plans

DRIVERS = {
    "at once": lambda: DeliverAtOnce(),
    "at once, last rank first": lambda: DeliverAtOnce(-1),
    "late": DeliverLate,
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_are_exact_with_every_driver(strategy: str, driver: str) -> None:
    """The round-robin layout gives messages of many ranges of rows."""
    for mask in MASKS.values():
        for layout in ("zigzag", "round_robin"):
            plans = [plan.for_heads(4, 2) for plan in all_plans(mask, 4, strategy, layout)]
            assert worst_error(plans, case(mask), DRIVERS[driver]().run) <= EXACT


@settings(max_examples=40)
@given(data=st.data())
def test_any_mask_on_any_layout_is_exact(data: st.DataObject) -> None:
    mask = data.draw(masks(max_len=14)).mask
    world = data.draw(st.integers(1, 4))
    layout, kv_layout = data.draw(layouts(mask, world)), data.draw(layouts(mask.transposed, world))
    strategy = data.draw(st.sampled_from(STRATEGIES))
    first = rs.plan(mask, world=world, strategy=strategy, layout=layout, kv_layout=kv_layout).for_heads(4, 2)
    driver = DRIVERS[data.draw(st.sampled_from(sorted(DRIVERS)))]()
    assert worst_error([first.at(rank) for rank in range(world)], case(mask), driver.run) <= EXACT


def test_a_driver_lets_ranks_run_steps_ahead() -> None:
    """Check that the tests above run ranks at different steps."""
    mask = rs.causal(32)
    driver = DeliverAtOnce()
    worst_error(all_plans(mask, 8, "gather(stages=7)", "contiguous"), case(mask), driver.run)
    assert driver.furthest_apart >= 3


# -- requests ---------------------------------------------------------------------------------------------------------


class LoggingKernel:
    """The CPU kernel. It logs its calls."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def attend(self, *args: Any, **options: Any) -> Iterator[PartialRows]:
        self.log.append("attend")
        yield from cpu.attend(*args, **options)


def run_alone(plan: rs.Plan, log: list[str], posts: list[PostExchange]) -> None:
    """Run the forward generator of one rank. Its receive buffers are filled with zeros."""
    q, kv = torch.randn(plan.q_rows, 1, 2, 4), torch.randn(plan.kv_rows, 1, 2, 8)
    generator = forward(plan, q, kv, AttentionConfig(kernel=LoggingKernel(log), scale=1.0, head_dim=4))  # type: ignore[arg-type]
    answer = None
    try:
        while True:
            request = generator.send(answer)
            log.append(f"post {request.label}" if isinstance(request, PostExchange) else f"wait {request.pending}")
            answer = request.label if isinstance(request, PostExchange) else None
            if isinstance(request, PostExchange):
                posts.append(request)
                for _, tensor in request.recvs:
                    tensor.zero_()
    except StopIteration:
        pass


def test_kernels_run_between_post_and_wait() -> None:
    log: list[str] = []
    run_alone(rs.plan(rs.full(12), world=3, strategy="ring", layout="contiguous"), log, [])
    assert log == [
        "post forward step 0",
        "attend",
        "wait forward step 0",
        "post forward step 1",
        "attend",
        "wait forward step 1",
        "attend",
    ]


def test_one_rank_yields_no_requests() -> None:
    log: list[str] = []
    run_alone(rs.plan(rs.causal(12), world=1), log, [])
    run_alone(rs.plan(rs.documents([4, 4, 4]), world=3, layout="contiguous", strategy="exchange"), log, [])
    assert log == ["attend", "attend"]


def test_a_ring_sends_views_and_forwards_what_it_received() -> None:
    posts: list[PostExchange] = []
    run_alone(rs.plan(rs.full(12), world=4, strategy="ring", layout="contiguous"), [], posts)
    for before, after in pairwise(posts):
        assert before.recvs[0][1].data_ptr() == after.sends[0][1].data_ptr()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_posts_are_the_transfers_of_the_plan(strategy: str) -> None:
    plan = rs.plan(rs.causal(24), world=4, rank=1, strategy=strategy, layout="zigzag").for_heads(2, 2)
    posts: list[PostExchange] = []
    run_alone(plan, [], posts)
    steps = [step for step in plan.program.forward if step.sends or step.recvs]
    assert len(posts) == len(steps)
    for post, step in zip(posts, steps, strict=True):
        assert [(peer, len(x)) for peer, x in post.sends] == [(t.peer, t.count) for t in step.sends if t.peer != 1]
        assert [(peer, len(x)) for peer, x in post.recvs] == [(t.peer, t.count) for t in step.recvs if t.peer != 1]


# -- no I/O ------------------------------------------------------------------------------------------------------------

ENGINE = sorted(Path(ringspan.engine.__file__).parent.glob("*.py"))

# What the engine uses of the transports: the requests that it yields. A plan handle holds a transport and runs the
# handshake.
# all_gather_by_messages is a generator of requests.
REQUESTS = {"CallDescription", "CallPair", "PostExchange", "WaitExchange", "RankGenerator", "all_gather_by_messages"}
HANDSHAKE = {
    "CallDescription",
    "ProcessGroupTransport",
    "RankSignature",
    "check_agreement",
    "digest_as_int64",
    "report_refusal",
}
HANDSHAKE |= {"DTYPES", "NO_SCORE_MOD", "SHARD_ADVICE", "VERSION", "Agreements", "agreements"}


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.name)
def test_the_engine_does_no_io(path: Path) -> None:
    """It imports no torch.distributed, starts no thread or process and opens no file."""
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert [name for name in imported if name.startswith(("torch.distributed", "socket", "threading", "subprocess", "os"))] == (
        ["threading.Lock"] if path.name in ("handles.py", "graph_pool.py") else []
    )
    of_transports = {name.rpartition(".")[2] for name in imported if name.startswith("ringspan.transports")}
    assert of_transports <= (HANDSHAKE if path.name == "handles.py" else REQUESTS)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "distributed"]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in ("open", "print")]
