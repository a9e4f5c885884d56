"""``return_max_logits`` with the kernels for GPUs, executed and replayed, against dense scores in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.engine.graph_replay import CapturedPass
from ringspan.engine.recorded_pass import RecordedPass
from ringspan.kernels import fused_logits, max_logits, reference
from ringspan.testing.assertions import assert_close
from tests.engine.test_graph_replay_gpu import graphs
from tests.engine.test_recording_gpu import replays
from tests.kernels.test_gpu import skip_if_unavailable

pytestmark = pytest.mark.gpu

__all__ = ["graphs", "replays"]

N, H, G = 1024, 8, 2
MASKS = {
    "causal": rs.causal(N),
    "window": rs.causal(N) & rs.window(left=100),
    "many documents": rs.documents([16] * 64),
}


def tensors(dtype: torch.dtype, dim: int, seed: int = 0) -> list[Tensor]:
    source = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(2, h, N, dim, device="cuda", generator=source).to(dtype).requires_grad_() for h in (H, G, G)]


def expected(q: Tensor, k: Tensor, mask: rs.Mask, cap: float | None = None) -> Tensor:
    score = q.double() @ k.double().repeat_interleave(H // G, 1).mT * q.shape[-1] ** -0.5
    score = score if cap is None else cap * torch.tanh(score / cap)
    return score.masked_fill(~torch.from_numpy(mask.dense()).cuda(), -torch.inf).amax((0, 2, 3)).detach()


@pytest.mark.parametrize("dim", [16, 40, 64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_triton_kernel(dtype: torch.dtype, dim: int) -> None:
    q, k, _ = tensors(dtype, dim)
    assert fused_logits.supports(q) == (dim <= 128 or dtype != torch.float32)
    for mask in MASKS.values():
        got = max_logits(reference, q, k, mask.bands, scale=dim**-0.5)  # type: ignore[arg-type]
        assert_close(got.double(), expected(q, k, mask), rtol=2e-6)


def test_many_heads() -> None:
    """Axes of a grid but for the first have at most 65,535 programs."""
    q, k = torch.randn(2, 1100, 64, 130, 16, device="cuda", dtype=torch.bfloat16).unbind()
    got = max_logits(reference, q, k, rs.causal(130).bands, scale=1.0)  # type: ignore[arg-type]
    hidden = ~torch.from_numpy(rs.causal(130).dense()).cuda()
    want = torch.stack(
        [(x.float() @ y.float().mT).masked_fill(hidden, -torch.inf).amax((1, 2)) for x, y in zip(q, k, strict=True)]
    )
    assert_close(got, want.amax(0), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["exchange(stages=1)", "ring", "ulysses", "pass_q"])
@pytest.mark.parametrize("backend", ["fa4", "cudnn", "flash", "efficient"])
def test_it_equals_dense_scores(backend: str, strategy: str, replays: list[RecordedPass]) -> None:
    skip_if_unavailable(backend, torch.bfloat16, 64)
    for mask in MASKS.values():
        options = {"mask": mask, "strategy": strategy, "backend": backend}
        for seed in range(3):  # executed, recorded, replayed
            qkv = tensors(torch.bfloat16, 64, seed)
            out, got = rs.LocalWorld(4).attention(*qkv, return_max_logits=True, **options)  # type: ignore[call-overload]
            assert_close(got.double(), expected(*qkv[:2], mask), rtol=2e-6)
            assert torch.equal(out, rs.LocalWorld(4).attention(*qkv, **options))  # type: ignore[call-overload]
            torch.autograd.grad(out.sum(), qkv)
    if backend == "fa4":
        assert any("max logits" in recorded.source for recorded in replays)


@pytest.mark.parametrize("backend", ["flex", "eager"])
def test_a_score_mod_comes_before_it(backend: str) -> None:
    options = {"score_mod": rs.softcap(2.0), "backend": backend, "return_max_logits": True}
    q, k, v = tensors(torch.bfloat16, 64)
    for mask in MASKS.values():
        _, got = rs.LocalWorld(2).attention(q, k, v, mask=mask, **options)  # type: ignore[call-overload]
        assert_close(got.double(), expected(q, k, mask, cap=2.0), rtol=1e-5)
    with torch.no_grad():
        q[1, 3, 700, 5] = torch.nan
    _, got = rs.LocalWorld(2).attention(q, k, v, mask=rs.causal(N), **options)  # type: ignore[call-overload]
    assert got.isnan().tolist() == [head == 3 for head in range(H)]


def test_it_is_captured_by_graphs_of_recorded_passes(graphs: list[CapturedPass]) -> None:
    skip_if_unavailable("fa4", torch.bfloat16, 64)
    options = {"mask": MASKS["causal"], "strategy": "ring", "backend": "fa4", "cuda_graphs": True}
    for seed in range(6):
        qkv = tensors(torch.bfloat16, 64, seed)
        _, got = rs.LocalWorld(4).attention(*qkv, return_max_logits=True, **options)  # type: ignore[call-overload]
        assert_close(got.double(), expected(*qkv[:2], MASKS["causal"]), rtol=2e-6)
    assert len(graphs) == 3 * 4, "from the fourth call on, on four ranks"


def test_a_cuda_graph_has_it() -> None:
    qkv = [x.detach() for x in tensors(torch.bfloat16, 64)]
    world = rs.LocalWorld(2)

    def attend() -> Tensor:
        return world.attention(*qkv, mask=MASKS["causal"], strategy="ring", return_max_logits=True)[1]

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend()
    for seed in (1, 2):
        for x, y in zip(qkv, tensors(torch.bfloat16, 64, seed), strict=True):
            x.copy_(y.detach())
        graph.replay()
        assert_close(got.double(), expected(*qkv[:2], MASKS["causal"]), rtol=2e-6)
