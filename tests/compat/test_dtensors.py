"""DTensors of ``Shard(2)`` in blocks and parallelized modules, and the hooks that make them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import ringspan as rs
from ringspan.compat import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    context_parallel,
    context_parallel_unshard,
)
from tests.compat.jobs import assert_near, mesh_of_all, qkv, single_process
from tests.conftest import Pools

N = 16


def as_dtensors(shards: list[torch.Tensor], mesh: DeviceMesh) -> list[DTensor]:
    return [DTensor.from_local(x.clone(), mesh, [Shard(2)], run_check=False) for x in shards]


def check(mesh: DeviceMesh, out: torch.Tensor, want: torch.Tensor, balancer: _LoadBalancer | None = None) -> None:
    assert isinstance(out, DTensor)
    assert out.shape == want.shape
    assert tuple(out.placements) == (Shard(2),)
    (got,) = context_parallel_unshard(mesh, [out.to_local()], [2], balancer)
    assert_near(got, want)


def in_a_block(rank: int) -> None:
    """Also with buffers of two lengths, where the tensors tell which one is meant."""
    mesh, whole = mesh_of_all(), qkv(N)
    want, _ = single_process(*whole, is_causal=True)
    for extra in ([], [torch.zeros(12)]):
        q, k, v = (x.clone() for x in whole)
        buffers = [q, k, v, *extra]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2, 0][: len(buffers)]):
            tensors = as_dtensors([q, k, v], mesh)
            check(mesh, F.scaled_dot_product_attention(*tensors, is_causal=True), want)
            plan = rs.plan(rs.causal(N), world=mesh.size(), rank=rank, layout="zigzag")
            check(mesh, rs.attention(*tensors, plan=plan, group=mesh), want)


class Sdpa(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def in_a_module(rank: int) -> None:
    mesh, whole = mesh_of_all(), qkv(N)
    module = parallelize_module(Sdpa(), mesh, _ContextParallel(2, _ContextParallel.AttentionType.SDPA))
    want, _ = single_process(*whole, is_causal=True)
    for balancer in (None, _HeadTailLoadBalancer(N, mesh.size(), "cpu")):
        _cp_options.enable_load_balance = balancer is not None  # forget the other order
        tensors = as_dtensors(_context_parallel_shard(mesh, whole, [2] * 3, balancer), mesh)
        check(mesh, module(*tensors, is_causal=True), want, balancer)


def gradients(rank: int) -> None:
    mesh, whole = mesh_of_all(), qkv(N)
    _, want = single_process(*whole, is_causal=True)
    q, k, v = (x.clone() for x in whole)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        tensors = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in leaves]
        out = F.scaled_dot_product_attention(*tensors, is_causal=True)
        out.to_local().square().sum().backward()
    for got, expected in zip(context_parallel_unshard(mesh, [x.grad for x in leaves], [2] * 3), want, strict=True):
        assert_near(got, expected)


def hooks_for_sdpa(rank: int) -> None:
    """By torch's hooks, tensors become DTensors on the way in and local tensors on the way out."""
    mesh, whole = mesh_of_all(), qkv(N)
    style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
    q, k, v = (x.clone() for x in whole)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        args, kwargs = style.sdpa_input_fn(None, (q.clone(), k.clone()), {"value": v.clone(), "is_causal": True}, mesh)
        again, _ = style.sdpa_input_fn(None, args, kwargs, mesh)
        assert again[0] is args[0]
        out = style.sdpa_output_fn(None, (args, kwargs), F.scaled_dot_product_attention(*args, **kwargs), mesh)
        several = style.sdpa_output_fn(None, (), (args[0], "x"), mesh)
    assert type(out) is torch.Tensor
    assert type(several[0]) is torch.Tensor
    assert several[1] == "x"
    assert_near(context_parallel_unshard(mesh, [out], [2])[0], single_process(*whole, is_causal=True)[0])
    with pytest.raises(rs.InputError, match=r"must be Shard\(2\)"):
        style.sdpa_input_fn(None, (DTensor.from_local(whole[0], mesh, [Replicate()]),), {}, mesh)


JOBS = [in_a_block, in_a_module, gradients, hooks_for_sdpa]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("job", JOBS, ids=[job.__name__ for job in JOBS])
def test_dtensors(pools: Pools, job: Callable[..., None], world: int) -> None:
    pools(world).run(job)
