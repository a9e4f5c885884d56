"""Compiled modules with the style, and compiled functions around them, over gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ringspan.compat import (
    _context_parallel_shard,
    _ContextParallel,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    context_parallel_unshard,
)
from ringspan.testing.assertions import assert_close
from tests.compat.jobs import mesh_of_all
from tests.conftest import Pools

N, H, D = 256, 2, 8
FLEX, SDPA = _ContextParallel.AttentionType.FLEX, _ContextParallel.AttentionType.SDPA


class Sdpa(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Flex(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask | None = None) -> Tensor:
        return flex_attention(q, k, v, block_mask=block_mask)  # type: ignore[return-value]


def windows(size: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (k <= q) & (q - k < size)


CASES: dict[str, tuple[type[nn.Module], Any, bool]] = {
    "SDPA": (Sdpa, SDPA, False),
    "flex": (Flex, FLEX, False),
    "flex with a BlockMask": (Flex, FLEX, True),
}


def job(rank: int, case: str, enclosing: bool, fullgraph: bool, backend: str) -> None:
    torch._dynamo.reset()
    kind, attention_type, masked = CASES[case]
    mesh = mesh_of_all()
    module = parallelize_module(kind(), mesh, _ContextParallel(2, attention_type))
    if enclosing:

        def block(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask | None) -> Tensor:
            return module(q.sin(), k, v, block_mask).cos()

        called: Any = torch.compile(block, backend=backend, fullgraph=fullgraph)
    else:
        compiled = torch.compile(module, backend=backend, fullgraph=fullgraph)

        def called(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask | None) -> Tensor:
            return compiled(q.sin(), k, v, block_mask).cos()

    balancer = _HeadTailLoadBalancer(N, dist.get_world_size(), "cpu")
    q_idx, k_idx = torch.arange(N)[:, None], torch.arange(N)[None]
    for step, size in enumerate((40, 90, 40)):
        torch.manual_seed(step)
        whole = [torch.randn(2, H, N, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        block_mask = create_block_mask(windows(size), 1, 1, N, N, device="cpu", BLOCK_SIZE=16) if masked else None
        shards = _context_parallel_shard(mesh, whole, [2] * 3, balancer)
        if block_mask is not None:
            (block_mask,) = _context_parallel_shard(mesh, [block_mask], [2], balancer)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            out = called(*shards, block_mask)
        visible = windows(size)(0, 0, q_idx, k_idx) if masked else (k_idx <= q_idx if kind is Sdpa else k_idx < N + q_idx)
        want = F.scaled_dot_product_attention(whole[0].sin(), whole[1], whole[2], attn_mask=visible).cos()
        assert_close(context_parallel_unshard(mesh, [out.detach()], [2], balancer)[0], want, atol=1e-10)
        grads = torch.autograd.grad(out.square().sum(), whole)
        for mine, exact in zip(grads, torch.autograd.grad(want.square().sum(), whole), strict=True):
            dist.all_reduce(mine)
            assert_close(mine, exact, atol=1e-10)


@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "graph breaks allowed"])
@pytest.mark.parametrize("enclosing", [True, False], ids=["compiled function around the module", "compiled module"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_one_process(pools: Pools, case: str, enclosing: bool, fullgraph: bool) -> None:
    pools(2).run(job, case, enclosing, fullgraph, "aot_eager")


def test_inductor(pools: Pools) -> None:
    pools(2).run(job, "flex with a BlockMask", True, True, "inductor")


def rows_job(rank: int, balancer_name: str) -> None:
    """A balancer that orders each row of the batch differently, and then one that does not, in one program."""
    torch._dynamo.reset()
    mesh, world = mesh_of_all(), dist.get_world_size()
    called = torch.compile(parallelize_module(Flex(), mesh, _ContextParallel(2, FLEX)), backend="aot_eager", fullgraph=True)
    q_idx, k_idx = torch.arange(N)[:, None], torch.arange(N)[None]
    for step, lengths in enumerate(([[64, 128, 64], [192, 32, 32]], [[128, 128], [64, 192]], [[256], [256]])):
        torch.manual_seed(step)
        ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])

        def visible(b: Any, h: Any, q: Any, k: Any, ids: Tensor = ids) -> Tensor:
            return (ids[b, q] == ids[b, k]) & (k <= q)

        whole = [torch.randn(2, H, N, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        block_mask = create_block_mask(visible, 2, 1, N, N, device="cpu", BLOCK_SIZE=16)
        balancer: Any = _HeadTailLoadBalancer(N, world, "cpu")
        if step < 2:
            per_document = _PerDocumentHeadTailLoadBalancer(lengths, world, "cpu")
            balancer = per_document if balancer_name == "per document" else _PTRRLoadBalancer(block_mask, world)
        *shards, mine = _context_parallel_shard(mesh, [*whole, block_mask], [2] * 4, balancer)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            out = called(*shards, mine)
        seen = torch.stack([visible(b, 0, q_idx, k_idx) for b in range(2)])[:, None]
        want = F.scaled_dot_product_attention(*whole, attn_mask=seen)
        assert_close(context_parallel_unshard(mesh, [out.detach()], [2], balancer)[0], want, atol=1e-10)
        grads = torch.autograd.grad(out.square().sum(), whole)
        for mine_grad, exact in zip(grads, torch.autograd.grad(want.square().sum(), whole), strict=True):
            dist.all_reduce(mine_grad)
            assert_close(mine_grad, exact, atol=1e-10)


@pytest.mark.parametrize("balancer", ["per document", "PTRR"])
def test_balancers_that_order_each_row_differently(pools: Pools, balancer: str) -> None:
    pools(2).run(rows_job, balancer)


class Scored(nn.Module):
    """A score_mod cannot be part of an operator: the graph breaks, and attention is computed eagerly."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        q = q.sin()
        out = flex_attention(q, k, v, score_mod=lambda score, b, h, q, k: score * 0.5 + q - k, block_mask=block_mask)
        return out.cos()  # type: ignore[union-attr]


def score_mod_job(rank: int) -> None:
    torch._dynamo.reset()
    mesh = mesh_of_all()
    module = torch.compile(parallelize_module(Scored(), mesh, _ContextParallel(2, FLEX)), backend="aot_eager")
    balancer = _HeadTailLoadBalancer(N, dist.get_world_size(), "cpu")
    torch.manual_seed(0)
    whole = [torch.randn(2, H, N, D, dtype=torch.float64) for _ in range(3)]
    block_mask = create_block_mask(windows(40), 1, 1, N, N, device="cpu", BLOCK_SIZE=16)
    *shards, mine = _context_parallel_shard(mesh, [*whole, block_mask], [2] * 4, balancer)
    out = module(*shards, mine)
    q_idx, k_idx = torch.arange(N)[:, None], torch.arange(N)[None]
    bias = (q_idx - k_idx).double().masked_fill(~windows(40)(0, 0, q_idx, k_idx), float("-inf"))
    q, k, v = whole
    want = F.scaled_dot_product_attention(q.sin(), k, v, attn_mask=bias, scale=0.5 * D**-0.5).cos()
    assert_close(context_parallel_unshard(mesh, [out], [2], balancer)[0], want, atol=1e-10)


def test_a_score_mod_is_a_graph_break(pools: Pools) -> None:
    pools(2).run(score_mod_job)


def copies_job(rank: int) -> None:
    """A copy of a parallelized module has its own parameters, and both are context-parallel."""
    mesh = mesh_of_all()
    module = parallelize_module(Projected(), mesh, _ContextParallel(2, SDPA))
    copy = deepcopy(module)
    with torch.no_grad():
        copy.weight.fill_(3.0)
    balancer = _HeadTailLoadBalancer(N, dist.get_world_size(), "cpu")
    torch.manual_seed(0)
    whole = [torch.randn(1, H, N, D, dtype=torch.float64) for _ in range(3)]
    shards = _context_parallel_shard(mesh, whole, [2] * 3, balancer)
    exact = F.scaled_dot_product_attention(*whole, is_causal=True)
    for one, factor in ((module, 1.0), (copy, 3.0)):
        out = context_parallel_unshard(mesh, [one(*shards).detach()], [2], balancer)[0]
        assert_close(out, factor * exact, atol=1e-10)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weight * F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_copies_of_a_module_have_their_own_parameters(pools: Pools) -> None:
    pools(2).run(copies_job)
