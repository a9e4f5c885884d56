"""Passes that are replayed as CUDA graphs against executed ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.engine import config_for
from ringspan.engine.executor import forward
from ringspan.engine.graph_replay import CapturedPass, GraphedPass
from ringspan.engine.recording import PassRecorder
from ringspan.kernels import launches
from ringspan.transports import PostExchange, RankGenerator
from tests.engine.test_recording_gpu import MASKS, STRATEGIES, N, compare, tensors
from tests.kernels.test_gpu import skip_if_unavailable

pytestmark = pytest.mark.gpu


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CapturedPass]]:
    """Return a list of the captured passes that are replayed."""
    replayed: list[CapturedPass] = []
    replay = CapturedPass.replay

    def noting(self: CapturedPass, inputs: Any) -> Any:
        replayed.append(self)
        return replay(self, inputs)

    monkeypatch.setattr(CapturedPass, "replay", noting)
    rs.clear_caches()
    yield replayed
    rs.clear_caches()


def attend(mask: rs.Mask, strategy: str, backend: str, seed: int, *, cuda_graphs: bool = True) -> list[Tensor]:
    qkv = tensors(seed)
    options: dict[str, Any] = {"return_lse": True, "cuda_graphs": cuda_graphs}
    out, lse = rs.LocalWorld(4).attention(*qkv, mask=mask, strategy=strategy, backend=backend, **options)
    loss = (out.float() * torch.linspace(-1, 1, 64, device="cuda")).sum() + lse.sum()
    return [out, lse, *torch.autograd.grad(loss, qkv)]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert not x.isnan().any()
        assert torch.equal(x, y)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
def test_graphs_compute_the_same_bits(graphs: list[CapturedPass], name: str, strategy: str) -> None:
    expected = [attend(MASKS[name], strategy, "flash", seed, cuda_graphs=False) for seed in range(3)]
    found = [attend(MASKS[name], strategy, "flash", seed % 3) for seed in range(8)]
    assert len(graphs) == 5 * 2 * 4, "from the fourth call on, both passes, on four ranks"
    for seed, results in enumerate(found):
        compare(results, expected[seed % 3])  # the kernel adds the parts of dq in any order
        assert_equal(results[3:], expected[seed % 3][3:])


@pytest.mark.parametrize("backend", ["fa4", "flash"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
def test_graphs_equal_executed_passes(graphs: list[CapturedPass], name: str, strategy: str, backend: str) -> None:
    skip_if_unavailable(backend, torch.bfloat16, 64)
    expected = [attend(MASKS[name], strategy, backend, seed, cuda_graphs=False) for seed in range(2)]
    found = [attend(MASKS[name], strategy, backend, seed % 2) for seed in range(6)]
    assert len(graphs) == 3 * 2 * 4
    for seed, results in enumerate(found):
        compare(results, expected[seed % 2])


# -- one rank of four --------------------------------------------------------------------------------------------------


class ConstantMessages:
    """A transport that fills every receive buffer with the same number."""

    def run(self, generators: Sequence[RankGenerator[Any]], description: Any = None) -> list[Any]:
        results = []
        for generator in generators:
            try:
                while True:
                    request = generator.send(None)
                    if isinstance(request, PostExchange):
                        receive(request)
            except StopIteration as end:
                results.append(end.value)
        return results


def receive(request: PostExchange) -> None:
    for _, buffer in request.recvs:
        buffer.fill_(0.25)


def pass_of(seed: int, *, cuda_graphs: bool = True, strategy: str = "ring") -> RankGenerator[tuple[Tensor, ...]]:
    """Return the generator of a forward pass of rank 1."""
    plan = rs.plan(rs.causal(N), world=4, strategy=strategy).for_heads(8, 4).at(1)
    q, k, v = (x.detach()[:, :, : plan.q_rows] for x in tensors(seed))
    config = config_for(plan, q, v, 0.125, "flash", cuda_graphs=cuda_graphs)
    kv = torch.cat([k, v], dim=-1).movedim(2, 0).contiguous()
    return forward(plan, q.contiguous().movedim(2, 0), kv, config)


def run(generator: RankGenerator[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = ConstantMessages().run([generator])[0]
    return found


def test_a_pass_in_progress_is_replayed_without_graphs(graphs: list[CapturedPass]) -> None:
    expected = [run(pass_of(seed, cuda_graphs=False)) for seed in range(2)]
    for _ in range(4):
        run(pass_of(0))
    assert len(graphs) == 1
    first, second = pass_of(0), pass_of(1)
    request = first.send(None)
    assert isinstance(request, PostExchange)
    assert_equal(run(second), expected[1])
    assert len(graphs) == 2
    receive(request)
    assert_equal(run(first), expected[0])
    assert_equal(run(pass_of(1)), expected[1])
    assert len(graphs) == 3


def test_passes_of_several_plans_share_memory(graphs: list[CapturedPass]) -> None:
    strategies = ["ring", "gather", "exchange(stages=1)", "exchange(stages=2)"]
    expected = {strategy: run(pass_of(0, cuda_graphs=False, strategy=strategy)) for strategy in strategies}
    for _ in range(4):
        for strategy in strategies:
            run(pass_of(1, strategy=strategy))
    assert len(graphs) == 4
    assert len({id(captured.pool) for captured in graphs}) == 1
    for _ in range(3):
        for strategy in strategies:
            assert_equal(run(pass_of(0, strategy=strategy)), expected[strategy])
    assert len(graphs) == 16


def test_memory_does_not_grow(graphs: list[CapturedPass]) -> None:
    allocated, reserved = [], []
    for seed in range(50):
        attend(MASKS["causal"], "ring", "flash", seed)
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    assert len(graphs) == 47 * 2 * 4
    for sizes in (allocated, reserved):
        assert max(sizes[25:]) <= max(sizes[10:25])


def test_clear_caches_releases_memory(graphs: list[CapturedPass]) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for seed in range(5):
        attend(MASKS["causal"], "ring", "flash", seed)
    assert graphs
    graphs.clear()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    assert held > before
    rs.clear_caches()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_another_stream_has_graphs_of_its_own(graphs: list[CapturedPass]) -> None:
    expected = [attend(MASKS["documents"], "exchange", "flash", seed, cuda_graphs=False) for seed in range(2)]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    streams[1].wait_stream(streams[0])
    found = []
    for n in range(12):
        with torch.cuda.stream(streams[n % 2]):
            found.append(attend(MASKS["documents"], "exchange", "flash", n % 2))
    streams[0].wait_stream(streams[1])
    assert len(graphs) == 2 * 3 * 2 * 4
    assert len({id(captured.pool) for captured in graphs}) == 2 * 4
    for n, results in enumerate(found):
        compare(results, expected[n % 2])


def test_a_cuda_graph_of_the_user(graphs: list[CapturedPass]) -> None:
    qkv = [x.detach() for x in tensors(0)]
    world = rs.LocalWorld(4)

    def call() -> Tensor:
        return world.attention(*qkv, mask=MASKS["causal"], strategy="ring", backend="flash", cuda_graphs=True)

    expected = [call() for _ in range(5)][-1]
    before = len(graphs)
    assert before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    assert len(graphs) == before
    graph.replay()
    assert torch.equal(captured, expected)
    assert torch.equal(call(), expected)
    assert len(graphs) == before + 4


def test_layers_in_one_backward_pass(graphs: list[CapturedPass]) -> None:
    def model(*, cuda_graphs: bool) -> list[Tensor]:
        qkv = tensors(0)
        q = qkv[0]
        for _ in range(6):
            options: dict[str, Any] = {"strategy": "ring", "backend": "flash", "cuda_graphs": cuda_graphs}
            q = q + rs.LocalWorld(4).attention(q, *qkv[1:], mask=MASKS["causal"], **options)
        return [q, *torch.autograd.grad(q.float().square().sum(), qkv)]

    expected, found = model(cuda_graphs=False), [model(cuda_graphs=True) for _ in range(2)]
    assert graphs
    for results in found:
        compare([results[0], results[0], *results[1:]], [expected[0], expected[0], *expected[1:]])


def test_a_launch_that_cannot_be_captured(graphs: list[CapturedPass], caplog: pytest.LogCaptureFixture) -> None:
    """CUDA invalidates the capture. The pass is replayed, and PyTorch's allocator and random numbers still work."""

    def kernel(x: Tensor, out: Tensor) -> None:
        out.copy_(x)
        torch.cuda.synchronize()

    def program(x: Tensor) -> RankGenerator[Any]:
        out = torch.empty_like(x)
        launches.launch(kernel, x, out)
        return (2 * out,)
        yield

    def doubled(x: Tensor) -> RankGenerator[Any]:
        return (2 * x,)
        yield

    x, finished = torch.ones(1000, device="cuda"), []
    for made_by in (program, doubled):
        run(PassRecorder([x]).run(made_by(x), nullcontext, finished.append))
    made, other = [GraphedPass(recorded, "a test", "the pass") for recorded in finished]
    with caplog.at_level("INFO", logger="ringspan.engine"):
        for n in range(4):
            assert torch.equal(run(made.replay([x * n]))[0], 2 * x * n)
    assert made.failure is not None
    assert not graphs
    for n in range(3):
        assert torch.equal(run(other.replay([x * n]))[0], 2 * x * n)
    assert len(graphs) == 2, "another pass is captured in another pool"
    graphs.clear()
    assert torch.randn(1000, device="cuda").isfinite().all()
    test_a_cuda_graph_of_the_user(graphs)
