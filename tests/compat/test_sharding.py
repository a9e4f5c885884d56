"""Sharding out of place and unsharding, over gloo processes: pytrees, balancers, dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

import ringspan as rs
from ringspan.compat import (
    _context_parallel_shard,
    _cp_options,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    context_parallel,
    context_parallel_unshard,
)
from tests.compat.jobs import assert_near, mesh_of_all, qkv, single_process
from tests.compat.test_balancers import documents_mask
from tests.conftest import Pools
from tests.meshes import cpu_mesh

sdpa = F.scaled_dot_product_attention
N = 64


class Strided(_LoadBalancer):
    """A user-defined balancer: the even tokens, then the odd ones."""

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        order = torch.cat([torch.arange(0, N, 2), torch.arange(1, N, 2)])[None]
        return order.argsort(dim=1) if restore else order


BALANCERS: dict[str, Callable[[int], _LoadBalancer | None]] = {
    "none": lambda world: None,
    "head-tail": lambda world: _HeadTailLoadBalancer(N, world, "cpu"),
    "per document": lambda world: _PerDocumentHeadTailLoadBalancer([[8, 24, 32]], world, "cpu"),
    "per document and row": lambda world: _PerDocumentHeadTailLoadBalancer([[8, 24, 32], [40, 24]], world, "cpu"),
    "round robin": lambda world: _PTRRLoadBalancer(documents_mask([[8, 24, 32], [40, 24]], block=8), world),
    "user-defined": lambda world: Strided(),
}


def shard_and_unshard(rank: int, name: str) -> None:
    """A shard of the positions gives the tokens that every other shard must have, as in torch's test."""
    mesh = mesh_of_all()
    balancer = BALANCERS[name](mesh.size())
    positions = torch.arange(N).expand(2, N)
    x = torch.randn(2, 3, N, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tree = {"positions": positions, "more": [x, x.detach()[..., 0]]}
    got = _context_parallel_shard(mesh, tree, {"positions": 1, "more": [2, -1]}, balancer)
    here = got["positions"]
    assert here.shape == (2, N // mesh.size())
    for b in range(2):
        assert torch.equal(got["more"][0][b], x[b][:, here[b]])
        assert torch.equal(got["more"][1][b], x.detach()[b, :, here[b], 0])
    if balancer is not None:
        order = balancer._generate_indices().expand(2, N).long()
        assert torch.equal(here, positions.gather(1, order).chunk(mesh.size(), dim=1)[rank])
    got["more"][0].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.sum(dim=(1, 3)) > 0, torch.zeros(2, N).scatter(1, here, 1.0) > 0)
    derived = [got["more"][0] * 2, got["positions"] + 0]
    for given in (None, balancer) if name in ("none", "head-tail") else (balancer,):
        whole = context_parallel_unshard(mesh, [got["more"][0], here, *derived], [2, 1, -2, 1], given)
        for back, was in zip(whole, [x.detach(), positions, x.detach() * 2, positions], strict=True):
            assert torch.equal(back, was)
            assert not back.requires_grad


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", BALANCERS)
def test_shard_and_unshard(pools: Pools, name: str, world: int) -> None:
    pools(world).run(shard_and_unshard, name)


def attention_over_shards(rank: int, name: str) -> None:
    """A block without buffers, over shards in the two orders that the switch can say."""
    mesh, whole = mesh_of_all(), qkv(N)
    shards = _context_parallel_shard(mesh, whole, [2] * 3, BALANCERS[name](mesh.size()))
    for is_causal in (True, False):
        with context_parallel(mesh):
            out = sdpa(*(2 * x for x in shards), is_causal=is_causal)
        assert_near(
            context_parallel_unshard(mesh, [out], [2])[0], single_process(*(2 * x for x in whole), is_causal=is_causal)[0]
        )


@pytest.mark.parametrize("name", ["none", "head-tail"])
def test_attention_over_shards(pools: Pools, name: str) -> None:
    pools(2).run(attention_over_shards, name)


def alternating_layouts(rank: int) -> None:
    """Blocks and shards in turn, each after an assignment to the switch, which says which order is meant."""
    mesh, x = mesh_of_all(), torch.arange(N)
    for _ in range(2):
        buffer = x.clone()
        _cp_options.enable_load_balance = True
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
            result = buffer + 0
        assert torch.equal(context_parallel_unshard(mesh, [result], [0])[0], x)
        _cp_options.enable_load_balance = False
        computed = _context_parallel_shard(mesh, [x], [0])[0] + 0
        assert torch.equal(context_parallel_unshard(mesh, [computed], [0])[0], x)


def one_axis_of_a_mesh(rank: int) -> None:
    """Two sequences over two ranks each. mesh["cp"] is a new object each time."""
    mesh = cpu_mesh((2, 2), ("dp", "cp"))
    x = torch.arange(10) + 100 * mesh["dp"].get_local_rank()
    (mine,) = _context_parallel_shard(mesh["cp"], [x], [0], _HeadTailLoadBalancer(10, 2, "cpu"))
    assert torch.equal(context_parallel_unshard(mesh["cp"], [mine * 2], [0])[0], x * 2)
    with pytest.raises(rs.InputError, match="a mesh of one axis is needed"):
        _context_parallel_shard(mesh, [x], [0])


def test_alternating_layouts(pools: Pools) -> None:
    pools(2).run(alternating_layouts)


def test_an_axis_of_a_larger_mesh(pools: Pools) -> None:
    pools(4).run(one_axis_of_a_mesh)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


WRONG: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "missing dims": (lambda mesh, x: _context_parallel_shard(mesh, [x, x], [0]), "2 buffers and 1 seq_dims"),
    "another structure": (lambda mesh, x: _context_parallel_shard(mesh, [[x, x], x], [0, 0]), "3 buffers and 2 seq_dims"),
    "not a tensor": (lambda mesh, x: _context_parallel_shard(mesh, ["x"], [0]), "tensors and BlockMasks, not str"),
    "no rows": (
        lambda mesh, x: _context_parallel_shard(
            mesh, [x], [0], _PerDocumentHeadTailLoadBalancer([[N], [8, N - 8]], mesh.size(), "cpu")
        ),
        "put the batch on dim 0",
    ),
    "unequal lists": (lambda mesh, x: context_parallel_unshard(mesh, [x], [0, 0]), "1 buffers and 2 seq_dims"),
    "a mask of two lengths": (
        lambda mesh, x: _context_parallel_shard(
            mesh, [create_block_mask(causal, None, None, 32, N, device="cpu")], [0], _HeadTailLoadBalancer(32, 2, "cpu")
        ),
        "32 queries and 64 keys.*without a balancer",
    ),
    "another length": (
        lambda mesh, x: context_parallel_unshard(mesh, [x], [0], _HeadTailLoadBalancer(N, mesh.size(), "cpu")),
        "make one for these",
    ),
}


def refused(rank: int, name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(mesh_of_all(), torch.arange(N))


@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_are_refused(pools: Pools, name: str) -> None:
    pools(2).run(refused, name)
