"""The front ends on a GPU: several numbers of ranks, profiler traces, CUDA graphs, and processes that share one
device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import ringspan as rs
from ringspan.engine import slots
from ringspan.frontends import local_world
from ringspan.kernels import flash_calls, flex
from ringspan.kernels.reference import dense_attention
from tests.conftest import Pools
from tests.kernels.compare import error, sdpa_math

pytestmark = pytest.mark.gpu

N = 1000


def tensors(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    source = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(1, h, N, 64, device="cuda", dtype=dtype, generator=source) for h in (8, 2, 2, 8)]


@pytest.mark.parametrize("strategy", ["exchange", "ring", "gather"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_any_number_of_ranks(world: int, strategy: str) -> None:
    q, k, v, grad = tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = rs.documents([400, 30, 570]) & rs.window(left=300)
    seen = torch.from_numpy(mask.dense()).cuda()
    exact, plain = dense_attention(q, k, v, seen).out, sdpa_math(q, k, v, seen)
    got = rs.LocalWorld(world).attention(q, k, v, mask=mask, strategy=strategy)
    assert error(got, exact) <= 2 * error(plain, exact)
    grads = [torch.autograd.grad((out * grad).sum(), leaves) for out in (got, exact, plain)]
    for mine, wanted, yardstick in zip(*grads, strict=True):
        assert error(mine, wanted) <= 2 * error(yardstick, wanted)


def test_a_trace_has_a_span_for_every_step_and_the_host_never_waits(tmp_path: Path) -> None:
    q, k, v, _ = tensors()
    world = rs.LocalWorld(2)
    plans = world.plans(rs.causal(N), strategy="ring", layout="zigzag")
    world.run(plans, q, k, v)  # warm-up: compiles, and fills the caches of the plan
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        world.run(plans, q, k, v)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e.get("name", "").startswith("ringspan::step") and e.get("cat") == "user_annotation"]
    assert sorted(e["name"] for e in spans) == [f"ringspan::step {n} forward, rank {rank}" for n in (0, 1) for rank in (0, 1)]
    for span in spans:
        inside = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and within(e, span)]
        assert any("aunch" in e["name"] for e in inside)
        assert not [e["name"] for e in inside if "Synchronize" in e["name"]]
    first, last = min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)
    between = {"ts": first, "dur": last - first}
    on_device = {e["cat"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and within(e, between)}
    assert "kernel" in on_device
    runtime = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and within(e, between)]
    assert not [name for name in runtime if "Synchronize" in name]


GRAPHS = [
    (backend, strategy) for backend in ("auto", "flash", "cudnn") for strategy in ("exchange(stages=1)", "ring", "pass_q")
]


@pytest.mark.parametrize(("backend", "strategy"), [*GRAPHS, ("flex", "ring")])
def test_a_cuda_graph_replays_attention(backend: str, strategy: str) -> None:
    """Forward and backward, with other values in the same tensors, after the caches were cleared, and captured
    again."""
    q, k, v, grad = tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    world = rs.LocalWorld(2)

    def step(mask: rs.Mask) -> list[torch.Tensor]:
        plans = world.plans(mask, strategy=strategy)
        out = world.run(plans, q, k, v, backend=backend).out
        return [out, *torch.autograd.grad(out, leaves, grad)]

    mask = rs.documents([400, 30, 570])
    graphs, replayed = [], []
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            step(mask)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            replayed.append(step(mask))
        for kept in (
            flash_calls.make_flash_calls,
            slots._index,
            flex.make_flex_calls,
            local_world._tokens,
            local_world._inverse_order,
        ):
            kept.cache_clear(keep_graphs=True)  # type: ignore[attr-defined]
    rubbish = [torch.full((n,), 2**30, dtype=torch.int32, device="cuda") for n in range(1, 2000) for _ in range(2)]
    with torch.no_grad():
        for x in (q, k, v, grad):
            x.copy_(torch.randn_like(x))
    wanted = step(mask)
    for graph, found in zip(graphs, replayed, strict=True):
        graph.replay()
        for n, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(mine, theirs) if n == 0 else error(mine, theirs) <= 1e-3 * theirs.abs().max().item()
    del rubbish


def test_a_block_in_a_cuda_graph() -> None:
    q, k, v, _ = tensors()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        cp = rs.ContextParallel(None, rs.documents([400, 30, 570]))
        want = rs.LocalWorld(1).attention(q, k, v, mask=cp.plan.mask)
        shards = cp.shard(q, k, v, dim=2)

        def step() -> torch.Tensor:
            with cp:
                return F.scaled_dot_product_attention(*shards, enable_gqa=True)

        first, graph = step(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = step()
        graph.replay()
        for out in (first, replayed):
            assert torch.equal(cp.unshard(out, dim=2), want)
    finally:
        dist.destroy_process_group()


def test_kernels_that_copy_masks_cannot_be_captured() -> None:
    q, k, v, _ = tensors()
    world = rs.LocalWorld(2)
    plans = world.plans(rs.causal(N) & rs.window(left=100), layout="contiguous")
    world.run(plans, q, k, v, backend="efficient")
    with (
        pytest.raises(rs.KernelError, match="copies a mask from the host in every call"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        world.run(plans, q, k, v, backend="efficient")


def test_capture_without_a_warm_up_raises() -> None:
    q, k, v, _ = tensors()
    world = rs.LocalWorld(2)
    plans = world.plans(rs.documents([123, 456, N - 579]), layout="contiguous")
    with pytest.raises(rs.KernelError, match="run the same call once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        world.run(plans, q, k, v, backend="flash")


def within(event: dict[str, Any], span: dict[str, Any]) -> bool:
    return span["ts"] <= event["ts"] < span["ts"] + span["dur"]


def job(rank: int, strategy: str) -> list[torch.Tensor]:
    q, k, v, grad = tensors()
    plan = rs.plan(rs.causal(N), world=2, rank=rank, strategy=strategy, layout="zigzag")
    mine = torch.from_numpy(plan.q_layout.positions(rank)).cuda()
    local = [x.index_select(2, mine).requires_grad_() for x in (q, k, v)]
    out = rs.attention(*local, plan=plan)
    grads = torch.autograd.grad(out, local, grad.index_select(2, mine))
    return [x.detach().cpu() for x in (out, *grads)]


@pytest.mark.parametrize("strategy", ["ring", "gather", "exchange(stages=1)"])
def test_two_processes_on_one_device_agree_with_two_ranks_in_one(strategy: str, pools: Pools) -> None:
    """Over gloo, which copies GPU tensors through host memory."""
    q, k, v, grad = tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    world = rs.LocalWorld(2)
    plans = world.plans(rs.causal(N), strategy=strategy, layout="zigzag")
    out = world.run(plans, q, k, v).out
    wanted = [out, *torch.autograd.grad(out, leaves, grad)]
    found = pools(2).run(job, strategy)
    for rank in range(2):
        rows = torch.from_numpy(plans[0].q_layout.positions(rank))
        for n, (mine, theirs) in enumerate(zip(found[rank], wanted, strict=True)):
            part = theirs.detach().cpu().index_select(2, rows)
            # Forward must be equal to the bit. Gradients are summed on the device in an order that varies between runs.
            assert torch.equal(mine, part) if n == 0 else error(mine, part) <= 1e-3 * part.abs().max().item()


def captured(rank: int) -> str:
    q, k, v, _ = tensors()
    plan = rs.plan(rs.causal(N), world=2, rank=rank, strategy="ring", layout="contiguous")
    local = [x[:, :, : plan.q_rows].contiguous() for x in (q, k, v)]
    rs.attention(*local, plan=plan)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            rs.attention(*local, plan=plan)
    except rs.TransportError as error:
        return str(error)
    return ""


def test_messages_over_gloo_cannot_be_captured(pools: Pools) -> None:
    for rank, said in enumerate(pools(2).run(captured)):
        assert said.startswith(f"rank {rank}: forward step 0 is being captured in a CUDA graph")
