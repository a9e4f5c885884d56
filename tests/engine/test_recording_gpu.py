"""Replayed passes of the kernels for GPUs against executed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.engine.recorded_pass import RecordedPass
from ringspan.testing.assertions import assert_close
from tests.kernels.test_gpu import skip_if_unavailable

pytestmark = pytest.mark.gpu

N = 1024
MASKS = {
    "causal": rs.causal(N),
    "window": rs.causal(N) & rs.window(left=100),
    "documents": rs.documents([300, 11, 500, 213]),
    "many documents": rs.documents([16] * 64),
}
STRATEGIES = ["exchange(stages=1)", "exchange(stages=2)", "ring", "gather", "ulysses", "pass_q", "hierarchical(per_node=2)"]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[RecordedPass]:
    """Return a list of the passes that are replayed."""
    replayed: list[RecordedPass] = []
    replay = RecordedPass.replay

    def noting(self: RecordedPass, inputs: Any) -> Any:
        replayed.append(self)
        return replay(self, inputs)

    monkeypatch.setattr(RecordedPass, "replay", noting)
    rs.clear_caches()
    return replayed


def tensors(seed: int, heads: int = 8, kv_heads: int = 4) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    return [torch.randn(1, h, N, 64, **made).requires_grad_() for h in (heads, kv_heads, kv_heads)]


def attend(mask: rs.Mask, strategy: str, backend: str, seed: int, *, with_lse: bool = False) -> list[Tensor]:
    qkv = tensors(seed)
    out, lse = rs.LocalWorld(4).attention(*qkv, mask=mask, strategy=strategy, backend=backend, return_lse=True)
    loss = (out.float() * torch.linspace(-1, 1, 64, device="cuda")).sum() + (lse.sum() if with_lse else 0.0)
    return [out, lse, *torch.autograd.grad(loss, qkv)]


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(x, y)
    for x, y in zip(found[2:], expected[2:], strict=True):  # kernels add to dq in any order
        assert_close(x, y, rtol=0.0, atol=0.02 * y.abs().max().item())


@pytest.mark.parametrize("backend", ["fa4", "flash"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
def test_a_replay_equals_an_executed_pass(replays: list[RecordedPass], name: str, strategy: str, backend: str) -> None:
    skip_if_unavailable(backend, torch.bfloat16, 64)
    executed = [attend(MASKS[name], strategy, backend, seed) for seed in (0, 1)]  # the second one is recorded
    assert not replays
    for seed in (0, 1, 0):
        compare(attend(MASKS[name], strategy, backend, seed), executed[seed])
    assert len(replays) == 3 * 2 * 4


@pytest.mark.parametrize("backend", ["fa4", "flash"])
def test_gradients_of_lse(replays: list[RecordedPass], backend: str) -> None:
    skip_if_unavailable(backend, torch.bfloat16, 64)
    executed = [attend(MASKS["causal"], "ring", backend, seed, with_lse=True) for seed in (0, 1)]
    compare(attend(MASKS["causal"], "ring", backend, 0, with_lse=True), executed[0])
    assert replays


def test_another_stream_has_recordings_of_its_own(replays: list[RecordedPass]) -> None:
    executed = [attend(MASKS["documents"], "exchange", "flash", seed) for seed in (0, 1)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend(MASKS["documents"], "exchange", "flash", 0)
        assert not replays
    torch.cuda.current_stream().wait_stream(side)
    compare(attend(MASKS["documents"], "exchange", "flash", 0), executed[0])
    assert replays


def test_a_cuda_graph_captures_an_executed_pass(replays: list[RecordedPass]) -> None:
    qkv = [x.detach() for x in tensors(0)]
    world = rs.LocalWorld(4)

    def call() -> Tensor:
        return world.attention(*qkv, mask=MASKS["causal"], strategy="ring", backend="flash")

    expected = [call() for _ in range(4)][-1]
    before = len(replays)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    assert len(replays) == before
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("change", [lambda x: x[..., 1:, :], lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)])
def test_inputs_with_other_strides(replays: list[RecordedPass], change: Callable[[Tensor], Tensor]) -> None:
    mask = rs.causal(N - 1)
    world = rs.LocalWorld(2)
    results = []
    for n in range(8):
        q, k, v = (x.detach()[..., 1:, :].contiguous() for x in tensors(n // 4))
        if n % 2:
            q, k, v = (change(torch.cat([x[..., :1, :], x], dim=2))[..., -(N - 1) :, :] for x in (q, k, v))
        results.append(world.attention(q, k, v, mask=mask, strategy="ring", backend="flash"))
    for n in (0, 4):
        for other in results[n + 1 : n + 4]:
            assert torch.equal(results[n], other)
