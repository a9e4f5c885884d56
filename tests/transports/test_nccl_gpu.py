"""Several ranks over NCCL: results, gradients, compilation, CUDA graphs, meshes, streams and failures.

The ranks take the GPUs of the machine in turn. Several ranks on one GPU need NCCL 2.30 and
NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringspan as rs
from ringspan.kernels.reference import dense_attention
from ringspan.plans.data import PHASES, Phase
from ringspan.testing import workers
from ringspan.testing.workers import Pool, WorkerFailed, send_message
from ringspan.transports import PostExchange, ProcessGroupTransport
from ringspan.transports.calls import Call
from tests.frontends.small_model import truth
from tests.frontends.test_compose import ddp, fsdp
from tests.kernels.compare import error, sdpa_math

pytestmark = pytest.mark.gpu

N, HEADS, KEY_HEADS, DIM = 1003, 8, 8, 64
MASKS = {
    "documents & window": rs.documents([400, 33, 570]) & rs.window(left=300),
    "causal": rs.causal(N),
    "prefix": rs.prefix(N, 200),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STRATEGIES = ("exchange", "ring", "gather", "ulysses", "hierarchical(per_node=2)", "hybrid(per_node=2)", "pass_q")
LIMIT = 8.0  # seconds to wait for an exchange, in the tests of failures


def nccl_version() -> int:
    """Return the version of the library that is loaded, 23007 for 2.30.7. PyTorch says which one it was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def reason_to_skip(world: int) -> str | None:
    """Say why this many NCCL ranks cannot run here. None: they can."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return "needs a CUDA device and NCCL"
    if world <= torch.cuda.device_count():
        return None
    if nccl_version() < 23000:
        return f"{world} ranks on {torch.cuda.device_count()} GPUs need NCCL 2.30"
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return f"{world} ranks on {torch.cuda.device_count()} GPUs need NCCL_MULTI_RANK_GPU_ENABLE=1"
    return None


def new_pool(world: int) -> Pool:
    if reason := reason_to_skip(world):
        pytest.skip(reason)
    return Pool(world, backend="nccl")


@pytest.fixture(scope="module")
def nccl_pools() -> Iterator[Callable[[int], Pool]]:
    """``nccl_pools(4)`` is a pool of four NCCL ranks, which a failing job closes."""
    pools: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        if world not in pools or pools[world].is_closed:
            pools[world] = new_pool(world)
        return pools[world]

    yield get
    for pool in pools.values():
        pool.close()


def tensors(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    source = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(1, heads, N, DIM, device="cuda", dtype=dtype, generator=source)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]


Figures = list[tuple[str, float, float]]


def whole_results(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: rs.Mask) -> tuple[list[Tensor], list[Tensor]]:
    """Return out, dq, dk and dv of one device: in float64, and by plain operations in the dtype of the inputs."""
    seen = torch.from_numpy(mask.dense()).cuda()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = []
    for out in (dense_attention(*leaves, seen).out, sdpa_math(*leaves, seen)):
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    return found[0], found[1]


def compare(cp: rs.ContextParallel, attend: Callable[..., Tensor], dtype: torch.dtype, seed: int = 0) -> Figures:
    """Return for out and each gradient: its name, its error, and the error of plain operations in the same dtype."""
    q, k, v, grad = tensors(dtype, seed)
    *leaves, local_grad = [x.detach() for x in cp.shard(q, k, v, grad, dim=2)]
    leaves = [x.requires_grad_() for x in leaves]
    out = attend(*leaves)
    local = [out.detach(), *torch.autograd.grad(out, leaves, local_grad)]
    return figures(cp, local, q, k, v, grad)


def figures(cp: rs.ContextParallel, local: list[Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Figures:
    exact, plain = whole_results(q, k, v, grad, cp.plan.mask)
    gathered = [cp.unshard(x, dim=2) for x in local]
    return [
        (name, error(mine, wanted), error(yardstick, wanted))
        for name, mine, wanted, yardstick in zip(("out", "dq", "dk", "dv"), gathered, exact, plain, strict=True)
    ]


def assert_within(found: list[Figures]) -> None:
    for rank, rows in enumerate(found):
        for name, mine, yardstick in rows:
            limit = 4 if "float32" in name else 2  # float32: sums in another order
            assert mine <= limit * yardstick, f"rank {rank}, {name}: error {mine:.2e}, plain operations {yardstick:.2e}"


# -- results -----------------------------------------------------------------------------------------------------------


def every_mask_and_dtype(rank: int, strategy: str) -> Figures:
    found: Figures = []
    for name, mask in MASKS.items():
        cp = rs.ContextParallel(None, mask, strategy=strategy, layout="zigzag" if name == "causal" else "auto")
        for dtype in DTYPES:
            found += [(f"{name}, {dtype}, {what}", *errors) for what, *errors in compare(cp, cp.attention, dtype)]
        q, k, v, _ = tensors(torch.float32)
        result = rs.attention(*cp.shard(q, k, v, dim=2), plan=cp.plan, return_lse=True)
        exact = dense_attention(q, k, v, torch.from_numpy(mask.dense()).cuda()).lse
        found.append((f"{name}, lse", error(cp.unshard(result.lse, dim=2), exact), 1e-4))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_strategy(nccl_pools: Callable[[int], Pool], world: int, strategy: str) -> None:
    found = nccl_pools(world).run(every_mask_and_dtype, strategy)
    assert len(found[0]) == len(MASKS) * (4 * len(DTYPES) + 1)
    assert_within(found)


def sums(rank: int) -> dict[str, bool]:
    cp = rs.ContextParallel(None, rs.documents([400, 33, 570]))
    whole = torch.arange(N, device="cuda", dtype=torch.float64)
    mine = cp.shard(whole, dim=0)
    parameter = torch.zeros(3, device="cuda", dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.full_like(parameter, rank + 1.0)
    cp.sum_gradients([parameter])
    assert parameter.grad is not None
    return {
        "unshard": torch.equal(cp.unshard(mine, dim=0), whole),
        "sum": cp.sum(mine).item() == whole.sum().item(),
        "mean": abs(cp.mean(mine).item() - whole.mean().item()) < 1e-10,
        "sum_gradients": parameter.grad.tolist() == [cp.world * (cp.world + 1) / 2] * 3,
    }


@pytest.mark.parametrize("world", [2, 4, 8])
def test_collectives(nccl_pools: Callable[[int], Pool], world: int) -> None:
    for found in nccl_pools(world).run(sums):
        assert all(found.values()), found


def compiled(rank: int) -> Figures:
    cp = rs.ContextParallel(None, MASKS["documents & window"], strategy="ring")

    @torch.compile(fullgraph=True)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 1.0, k, v)

    def inside(*local: Tensor) -> Tensor:
        with cp:
            return attend(*local)

    return compare(cp, inside, torch.bfloat16)


def test_compiled(nccl_pools: Callable[[int], Pool]) -> None:
    assert_within(nccl_pools(2).run(compiled))


def captured(rank: int, strategy: str) -> Figures:
    """Capture forward and backward with their exchanges in a CUDA graph, and replay it with other inputs."""
    cp = rs.ContextParallel(None, MASKS["documents & window"], strategy=strategy)
    *leaves, local_grad = [x.detach().clone() for x in cp.shard(*tensors(torch.bfloat16), dim=2)]
    leaves = [x.requires_grad_() for x in leaves]

    def step() -> list[Tensor]:
        out = cp.attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, local_grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        local = step()
    found: Figures = []
    for seed in range(20):
        given = tensors(torch.bfloat16, seed + 1)
        with torch.no_grad():
            for mine, new in zip((*leaves, local_grad), cp.shard(*given, dim=2), strict=True):
                mine.copy_(new)
        graph.replay()
        found += figures(cp, local, *given)
    return found


def captured_labels(rank: int) -> bool:
    """Shift integers in a CUDA graph. Return whether replays shift other integers, too."""
    cp = rs.ContextParallel(None, rs.causal(N), layout="zigzag")
    labels = torch.arange(N, device="cuda")
    mine = cp.shard(labels, dim=0).clone()
    cp.roll(mine, -1, dim=0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rolled = cp.roll(mine, -1, dim=0)
    are_equal = []
    for seed in range(3):
        mine.copy_(cp.shard(labels + seed, dim=0))
        graph.replay()
        shifted = torch.cat([labels[1:] + seed, labels.new_zeros(1)])
        are_equal.append(torch.equal(rolled, cp.shard(shifted, dim=0)))
    return all(are_equal)


def test_a_cuda_graph_with_integers(nccl_pools: Callable[[int], Pool]) -> None:
    """The comparison of calls must not wait for the device while a graph is captured."""
    assert all(nccl_pools(2).run(captured_labels))


@pytest.mark.parametrize("strategy", ["exchange", "ring", "gather", "ulysses", "pass_q"])
def test_a_cuda_graph_has_the_exchanges_inside(nccl_pools: Callable[[int], Pool], strategy: str) -> None:
    assert_within(nccl_pools(2).run(captured, strategy))


# -- other parallelism, meshes, streams --------------------------------------------------------------------------------


def train(rank: int, way: str) -> tuple[float, dict[str, Tensor]]:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "cp"))
    loss, gradients, _ = {"DDP": ddp, "FSDP": fsdp}[way](mesh)
    return loss, {name: grad.cpu() for name, grad in gradients.items()}


@pytest.mark.parametrize("way", ["DDP", "FSDP"])
def test_with_data_parallelism(nccl_pools: Callable[[int], Pool], way: str) -> None:
    loss, grads = truth()
    for found, theirs in nccl_pools(4).run(train, way):
        assert found == pytest.approx(loss, rel=1e-12)
        assert theirs.keys() == grads.keys()
        for name, grad in grads.items():
            assert torch.allclose(theirs[name], grad, rtol=0, atol=1e-12), name


def sub_groups(rank: int) -> Figures:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cp = rs.ContextParallel(groups[rank % 2], rs.causal(N))
    return compare(cp, cp.attention, torch.bfloat16)


def mesh_in_another_order(rank: int) -> Figures:
    cp = rs.ContextParallel(DeviceMesh("cuda", torch.tensor([3, 1, 0, 2])), rs.causal(N), strategy="ring")
    return compare(cp, cp.attention, torch.bfloat16)


def two_groups_in_turn(rank: int) -> Figures:
    cps = [rs.ContextParallel(dist.new_group(), mask) for mask in (MASKS["causal"], MASKS["documents & window"])]
    return [row for seed in range(4) for cp in cps for row in compare(cp, cp.attention, torch.bfloat16, seed)]


def side_stream(rank: int) -> Figures:
    """Inputs are made on the current stream, attention runs on another, and the result is used on the first."""
    cp = rs.ContextParallel(None, rs.causal(N), strategy="ring")
    side = torch.cuda.Stream()

    def attend(*local: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = cp.attention(*local)
        torch.cuda.current_stream().wait_stream(side)
        return out

    return [row for seed in range(4) for row in compare(cp, attend, torch.bfloat16, seed)]


@pytest.mark.parametrize("job", [sub_groups, mesh_in_another_order, two_groups_in_turn, side_stream], ids=lambda f: f.__name__)
def test_groups_and_streams(nccl_pools: Callable[[int], Pool], job: Callable[..., Any]) -> None:
    assert_within(nccl_pools(4).run(job))


# -- failures ----------------------------------------------------------------------------------------------------------


def mismatch(rank: int, how: str) -> str:
    mask = rs.full(N) if how == "mask" and rank == 1 else rs.causal(N)
    cp = rs.ContextParallel(None, mask, strategy="ring", layout="zigzag")
    q, k, v = cp.shard(*tensors(torch.bfloat16)[:3], dim=2)
    if how == "shape" and rank == 1:
        k, v = k[:, :, 1:], v[:, :, 1:]
    try:
        cp.attention(q, k, v)
    except rs.PeerMismatch as found:
        return str(found)
    return "no error"


@pytest.mark.parametrize("how", ["mask", "shape"])
def test_the_handshake_finds_a_mismatch(nccl_pools: Callable[[int], Pool], how: str) -> None:
    for message in nccl_pools(4).run(mismatch, how):
        assert "rank 1 has" in message


def other_order(rank: int, differs: bool) -> tuple[list[bool], float, str]:
    """Make two calls with equal messages, on rank 1 in the other order. Return which of their results and gradients are
    NaN, the mean, and the error of sum_gradients."""
    cp = rs.ContextParallel(dist.new_group(), rs.causal(N), strategy="ring", layout="zigzag")
    q, k, v = (x.detach().requires_grad_() for x in cp.shard(*tensors(torch.bfloat16)[:3], dim=2))
    cp.attention(q, k, v)
    scales = (0.5, 0.25) if rank == 1 and differs else (0.25, 0.5)
    outs = [cp.attention(q, k, v, scale=scale) for scale in scales]
    found = [*outs, *torch.autograd.grad(sum(outs), (q, k, v), torch.ones_like(q))]
    mean, error = cp.mean(outs[0].detach()), ""
    try:
        cp.sum_gradients([q])
    except rs.PeerMismatch as raised:
        error = str(raised)
    return [bool(x.isnan().all()) for x in found], float(mean), error


@pytest.mark.parametrize("differs", [False, True], ids=["equal calls", "another order"])
def test_no_number_follows_calls_in_another_order(nccl_pools: Callable[[int], Pool], differs: bool) -> None:
    for is_nan, mean, message in nccl_pools(2).run(other_order, differs):
        assert is_nan == [differs] * 5
        assert math.isnan(mean) == differs
        assert ("different calls, as cp.sum_gradients found" in message) == differs


def die_in(step: str) -> None:
    """Kill this process when it is about to post the messages of this step."""
    post = ProcessGroupTransport._post

    def post_or_die(self: ProcessGroupTransport, request: PostExchange, call: Call) -> Any:
        if request.label == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return post(self, request, call)

    ProcessGroupTransport._post = post_or_die  # type: ignore[method-assign]


def survive(rank: int, step: str, port: int) -> None:
    """Rank 1 is killed in this step. The others report their error, and what a fresh group of theirs computes afterwards."""
    cp = rs.ContextParallel(None, rs.causal(N), strategy="ring", layout="zigzag", timeout=LIMIT)
    q, k, v, grad = [x.detach() for x in cp.shard(*tensors(torch.bfloat16), dim=2)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    # CUDA loads a kernel at its first use, and waits then for NCCL's kernels, which wait for a dead rank. So both
    # passes are executed, recorded and replayed before.
    for _ in range(3):
        torch.autograd.grad(cp.attention(*leaves), leaves, grad)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        die_in(step)
    start, report = time.monotonic(), "no error"
    try:
        torch.autograd.grad(cp.attention(*leaves), leaves, grad)
    except rs.TransportError as found:
        report = f"{type(found).__name__}: {found}"
    seconds = time.monotonic() - start
    dist.destroy_process_group()
    survivors = [0, 2]
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("nccl", store=store, rank=survivors.index(rank), world_size=2)
    fresh = rs.ContextParallel(None, rs.causal(N), strategy="ring")
    send_message((report, seconds, compare(fresh, fresh.attention, torch.bfloat16)))


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_is_an_error_on_every_survivor(phase: Phase, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")  # else PyTorch ends the process when a message times out
    monkeypatch.setattr(workers, "GRACE_SECONDS", 90.0)  # survivors wait for the time limit, and start a new group
    reports: dict[int, tuple[str, float, Figures]] = {}
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    with new_pool(3) as pool, pytest.raises(WorkerFailed, match="worker 1: ended") as failed:
        pool.run(survive, f"{phase} step {step}", port, on_message=lambda rank, message: reports.__setitem__(rank, message))
    assert set(reports) == {0, 2}, failed.value
    for report, seconds, found in reports.values():
        assert report.startswith(("PeerLost: rank", "PeerTimeout: rank"))
        assert "rank 1" in report
        assert f"{phase} step" in report
        assert seconds < LIMIT + 5
        assert_within([found])
