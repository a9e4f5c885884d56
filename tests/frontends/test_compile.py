"""torch.compile and torch.export of models whose attention is context-parallel: one graph, the same numbers, no plan in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringspan as rs
from ringspan.kernels.reference import dense_attention
from ringspan.testing import assertions
from tests.conftest import Pools

pytestmark = pytest.mark.usefixtures("world_of_one")

N = 12
NEAR = rs.causal(N) & rs.window(left=2)
BACKENDS = ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A transformer's block; with ``near``, a second attention has a mask of its own."""

    def __init__(self, near: rs.ContextParallel | None = None) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.near = near

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(self.norm(x))
        q, k, v = h[..., :16].unflatten(-1, (4, 4)), h[..., 16:24].unflatten(-1, (2, 4)), h[..., 24:].unflatten(-1, (2, 4))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        if self.near is not None:
            with self.near:
                seen = seen + F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=-0.3, enable_gqa=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


def values_and_gradients(model: Callable[..., Tensor], parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])]


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Infinite if one of them has a NaN that the other has not."""
    return max(assertions.largest_difference(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("near", [None, NEAR], ids=["one mask", "two masks"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_for_all_values_and_all_documents(backend: str, near: rs.Mask | None) -> None:
    torch.manual_seed(0)
    block = Block(None if near is None else rs.ContextParallel(None, near)).double()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for lengths in ([5, 7], [5, 7], [12], [1, 3, 8]):
        x = torch.randn(2, N, 16, dtype=torch.float64, requires_grad=True)
        with rs.ContextParallel(None, rs.documents(lengths)):
            got, want = (values_and_gradients(f, list(block.parameters()), x) for f in (compiled, block))
        assert largest_difference(got, want) < 1e-12
    assert (counter.frame_count, counter.op_count > 5) == (1, True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_with_a_function(backend: str) -> None:
    torch.manual_seed(0)
    block = Block().double()
    mask = rs.mask_mod(lambda b, h, q, k: (q * 3 + k * k) % 7 < 4, N)
    assert mask.predicate is not None
    x = torch.randn(2, N, 16, dtype=torch.float64, requires_grad=True)
    with rs.ContextParallel(None, mask):
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        got = values_and_gradients(compiled, list(block.parameters()), x)
        with torch.inference_mode():
            assert torch.equal(compiled(x), got[0])
    assert largest_difference(got, values_and_gradients(Dense(block, mask), list(block.parameters()), x)) < 1e-12


def over_processes(rank: int, layout: str) -> float:
    """Uneven shares, compiled, against the dense truth; with an own size on each rank, and other sizes later."""
    torch._dynamo.reset()
    worst = 0.0
    torch.manual_seed(0)
    block = Block().double()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for lengths in ([5, 9, 1, 16], [3, 20], [7]):
        mask = rs.documents(lengths)
        cp = rs.ContextParallel(None, mask, layout=layout)
        whole = torch.randn(1, sum(lengths), 16, dtype=torch.float64)
        x = whole.clone().requires_grad_()
        with cp:
            y = compiled(cp.shard(x, dim=1))
        got = [cp.unshard(y.detach(), dim=1), *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])]
        for gradient in got[1:]:
            dist.all_reduce(gradient)
        want = values_and_gradients(Dense(block, mask), list(block.parameters()), whole.clone().requires_grad_())
        worst = max(worst, largest_difference(got, want))
    return worst


class Dense:
    """The block in one process, under a dense mask."""

    def __init__(self, block: Block, mask: rs.Mask) -> None:
        self.block, self.mask = block, torch.from_numpy(mask.dense())

    def __call__(self, x: Tensor) -> Tensor:
        h = self.block.project(self.block.norm(x))
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in h.split([16, 8, 8], dim=-1))
        return x + self.block.out(dense_attention(q, k, v, self.mask).out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_over_processes(pools: Pools, layout: str) -> None:
    assert max(pools(2).run(over_processes, layout)) < 1e-12


# -- functions that run functions: they are traced with the mode off ---------------------------------------------------


def with_a_rank_without_queries(rank: int, backend: str) -> list[float]:
    """Errors of out, dq, dk and dv of compiled attention, by one query that only one of two ranks has."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    cp = rs.ContextParallel(None, rs.full(1, N), strategy="pass_q", layout="contiguous")
    q = torch.randn(1, 4, 1, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 2, N, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    leaves = [cp.shard(x.detach(), dim=2, of=of).requires_grad_() for x, of in ((q, "q"), (k, "kv"), (v, "kv"))]  # type: ignore
    layer = torch.compile(lambda *qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True) * 2.0, backend=backend)
    with torch.no_grad(), cp:
        layer(*leaves)
    with cp:
        out = layer(*leaves)
    grads = torch.autograd.grad(out.sin().sum(), leaves)
    whole = dense_attention(q, k, v, torch.ones(1, N, dtype=torch.bool)).out * 2.0
    wanted = [whole, *torch.autograd.grad(whole.sin().sum(), (q, k, v))]
    sides: list[Any] = ["q", "q", "kv", "kv"]
    found = [cp.unshard(x.detach(), dim=2, of=of) for x, of in zip((out, *grads), sides, strict=True)]
    return [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_without_queries_takes_part(pools: Pools, backend: str) -> None:
    """Inductor would remove its attention, whose results have no elements, and the other rank would wait for it."""
    for errors in pools(2).run(with_a_rank_without_queries, backend):
        assert all(error <= 1e-12 for error in errors), errors  # NaN is not


def save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op == torch.ops.ringspan.attend.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def seldom(block: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e9, lambda x: block(x) * 2, lambda x: block(x) * 3, (x,)) / 3


BODIES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "selective": lambda block, x: checkpoint(
        block, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_attention)
    ),
    "cond": seldom,
}


@pytest.mark.parametrize("near", [None, NEAR], ids=["one mask", "two masks"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_attention_in_the_body_of_another_function(body: Callable[..., Tensor], near: rs.Mask | None) -> None:
    torch.manual_seed(0)
    block = Block(None if near is None else rs.ContextParallel(None, near)).double()
    x = torch.randn(2, N, 16, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: body(block, x), backend="aot_eager", fullgraph=True)
    with rs.ContextParallel(None, rs.documents([5, 7])):
        got, want = (values_and_gradients(f, list(block.parameters()), x) for f in (compiled, block))
    assert largest_difference(got, want) < 1e-12


def test_branches_in_eager_code() -> None:
    torch.manual_seed(0)
    block, x = Block().double(), torch.randn(2, N, 16, dtype=torch.float64)
    with torch.no_grad(), rs.ContextParallel(None, NEAR):
        assert torch.allclose(seldom(block, x), block(x), atol=1e-12)


# -- without a block ---------------------------------------------------------------------------------------------------


def test_a_plan_as_an_argument() -> None:
    """Another plan is another program; an equal one is not."""
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, plan: rs.Plan) -> Tensor:
        out, lse = rs.attention(q, q, q, plan=plan, return_lse=True)
        return out * 2 + lse.unsqueeze(-1)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    q = torch.randn(1, 2, N, 4, dtype=torch.float64, requires_grad=True)
    for mask in (rs.causal(N), NEAR, rs.causal(N)):
        got, want = (values_and_gradients(lambda q, f=f, m=mask: f(q, rs.plan(m, world=1)), [], q) for f in (compiled, attend))
        assert largest_difference(got, want) < 1e-12
    assert counter.frame_count == 2


def test_two_plans_in_one_program() -> None:
    def attend(q: Tensor, far: rs.Plan, near: rs.Plan) -> Tensor:
        return rs.attention(q, q, q, plan=far) + 2 * rs.attention(q, q, q, plan=near) - 3 * rs.attention(q, q, q, plan=far)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    plans = [rs.plan(mask, world=1) for mask in (rs.causal(N), NEAR)]
    assert torch.allclose(compiled(X, *plans), attend(X, *plans), atol=1e-12)


# -- what is refused, and what is left to eager code -------------------------------------------------------------------

X = torch.randn(2, 4, N, 8, dtype=torch.float64)
MHA = nn.MultiheadAttention(8, 2).double()
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "attn_mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(N, N).bool()),
    "dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    "is_causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "aten": lambda x: torch.ops.aten.scaled_dot_product_attention(x, x, x),
    "flash": lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x),
    "MultiheadAttention": lambda x: MHA(x[0, 0], x[0, 0], x[0, 0]),
}


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_compiled_code_refuses_attn_mask_too(call: Callable[..., Any], fullgraph: bool) -> None:
    kind = torch._dynamo.exc.Unsupported if fullgraph else rs.UnplannedAttention
    with rs.ContextParallel(None, rs.full(N)), pytest.raises(kind, match="UnplannedAttention" if fullgraph else None):
        torch.compile(call, backend="aot_eager", fullgraph=fullgraph)(X)


def test_compiled_code_runs_outside_the_block_it_was_compiled_in() -> None:
    """The graph belongs to the blocks it was traced in; with others, or none, there is another."""
    attend = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="aot_eager", fullgraph=True)
    cp = rs.ContextParallel(None, NEAR)
    for block, mask in ((cp, NEAR), (nullcontext(), rs.full(N)), (cp, NEAR), (rs.local_attention(), rs.full(N))):
        with block:
            assert torch.allclose(attend(X), dense_attention(X, X, X, torch.from_numpy(mask.dense())).out, atol=1e-12)


def test_each_block_uses_its_own_shard_handles() -> None:
    """Shards have plan handles of their own; a second block must not reuse those of the first."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("cp", "tp"))
    x = DTensor.from_local(X, mesh, [Shard(2), Shard(1)])
    attend = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="aot_eager", fullgraph=True)
    for reach in (1, 5, 1):
        mask = rs.mask_mod(lambda b, h, q, k, reach=reach: (k <= q) & (q - k <= reach + h), N, heads=4)
        seen = torch.stack([torch.from_numpy((rs.causal(N) & rs.window(left=reach + h)).dense()) for h in range(4)])
        with rs.ContextParallel(mesh["cp"], mask):
            got = attend(x).to_local()
        assert torch.allclose(got, F.scaled_dot_product_attention(X, X, X, attn_mask=seen), atol=1e-12)


def test_local_attention_around_compiled_functions() -> None:
    def inside(x: Tensor) -> Tensor:
        with rs.local_attention():
            return F.scaled_dot_product_attention(x, x, x)

    want = F.scaled_dot_product_attention(X, X, X)
    attend = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="aot_eager", fullgraph=True)
    with rs.ContextParallel(None, NEAR):
        with rs.local_attention():
            assert torch.allclose(attend(X), want)
        assert torch.allclose(torch.compile(inside, backend="aot_eager")(X), want)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="open it around the call"):
            torch.compile(inside, backend="aot_eager", fullgraph=True)(X)


def test_graph_breaks_do_not_leave_the_block() -> None:
    near = rs.ContextParallel(None, NEAR)

    def broken(x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x)
        torch._dynamo.graph_break()
        y = F.scaled_dot_product_attention(y, x, x)
        with near:
            y = F.scaled_dot_product_attention(y, x, x)
            torch._dynamo.graph_break()
            y = F.scaled_dot_product_attention(y, x, x)
        return F.scaled_dot_product_attention(y, x, x)

    with rs.ContextParallel(None, rs.causal(N)):
        want = broken(X)
        assert torch.allclose(torch.compile(broken, backend="aot_eager")(X), want, atol=1e-12)


# -- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("near", [None, NEAR], ids=["one mask", "two masks"])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_the_plan_id_as_a_constant(strict: bool, near: rs.Mask | None) -> None:
    torch.manual_seed(0)
    block = Block(None if near is None else rs.ContextParallel(None, near)).double()
    x, y = torch.randn(2, 2, N, 16, dtype=torch.float64).unbind()
    cp = rs.ContextParallel(None, rs.documents([5, 7]))
    with cp:
        program = torch.export.export(block, (x,), strict=strict)
        want = block(y)
    assert [n.target for n in program.graph.nodes].count(torch.ops.ringspan.attend.default) == (1 if near is None else 2)
    assert torch.allclose(program.module()(y), want, atol=1e-12)


def compiled_unshard(rank: int) -> tuple[list[float], list[float]]:
    torch._dynamo.reset()
    cp = rs.ContextParallel(None, rs.causal(N), layout="zigzag", strategy="ring")
    x = cp.shard(torch.arange(float(N)), dim=0).requires_grad_()
    whole = torch.compile(lambda x: cp.unshard(x * 2, dim=0) + 1, backend="eager")(x)
    (whole * torch.arange(float(N))).sum().backward()
    assert x.grad is not None
    return whole.tolist(), cp.unshard(x.grad, dim=0).tolist()


def test_unshard_breaks_the_graph(pools: Pools) -> None:
    for whole, grad in pools(2).run(compiled_unshard):
        assert whole == [2.0 * n + 1 for n in range(N)]
        assert grad == [2.0 * n for n in range(N)]
