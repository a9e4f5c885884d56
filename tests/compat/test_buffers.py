"""Buffers sharded in place for a block and restored after it: any dim, dtype, view or leaf."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ringspan.compat import context_parallel, context_parallel_unshard
from tests.compat.jobs import assert_near, mesh_of_all, qkv, single_process
from tests.conftest import Pools

sdpa = F.scaled_dot_product_attention


def zigzag_tokens(rank: int, world: int, tokens: int) -> torch.Tensor:
    """The tokens of a rank in torch's head-tail order, for any length."""
    cuts = [c * tokens // (2 * world) for c in range(2 * world + 1)]
    chunks = [torch.arange(a, b) for a, b in pairwise(cuts)]
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])


def any_dim_and_dtype(rank: int) -> None:
    mesh, n = mesh_of_all(), 11
    here = zigzag_tokens(rank, mesh.size(), n)
    first, last = torch.arange(n * 3).reshape(n, 3), torch.randn(2, 3, n, generator=torch.Generator().manual_seed(0))
    turns, flags = torch.polar(torch.ones(1, n), torch.arange(float(n))[None]), torch.arange(n) % 2 == 0
    buffers, dims = [first, last, turns, flags, first], [0, -1, 1, 0, -2]
    before, addresses = [x.clone() for x in buffers], [x.data_ptr() for x in buffers]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={flags}):
        for x, dim, was in zip(buffers, dims, before, strict=True):
            assert torch.equal(x, was.index_select(dim, here))
        assert torch.equal(context_parallel_unshard(mesh, [last], [-1])[0], before[1])
        first.zero_()  # changes the shard only
    assert torch.equal(flags, before[3][here])
    assert torch.equal(context_parallel_unshard(mesh, [flags], [0])[0], before[3])
    for x, was, address in zip([first, last, turns], before, addresses, strict=False):
        assert torch.equal(x, was)
        assert x.data_ptr() == address


def views_are_not_corrupted(rank: int) -> None:
    mesh = mesh_of_all()
    base = torch.arange(4 * 10.0).reshape(4, 10)
    was, view, other, expanded = base.clone(), base[:, 2:9], base.T, torch.arange(10).expand(3, 10)
    with context_parallel(mesh, buffers=[view, other, expanded], buffer_seq_dims=[1, 0, 1]):
        assert torch.equal(view, was[:, 2:9][:, zigzag_tokens(rank, mesh.size(), 7)])
        assert torch.equal(other, was.T[zigzag_tokens(rank, mesh.size(), 10)])
        view.fill_(-1)
        assert torch.equal(base, was)
    assert torch.equal(base, was)
    assert view.shape == (4, 7)
    base[0, 2] = 99.0
    assert view[0, 0] == other[2, 0] == 99.0  # still views of it


def gradients_of_buffers(rank: int) -> None:
    """A leaf that requires grad, used by a graph from before. Its gradient is a shard inside and whole after."""
    mesh, n = mesh_of_all(), 10
    x = torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = x.detach().clone()
    want, (dq, dk, dv) = single_process(x, x, x, is_causal=True)
    graph = (x * 2).sum()
    x.grad = torch.ones_like(x)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        assert x.grad is None
        out = sdpa(x, x, x, is_causal=True)
        out.square().sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        grad_shard = x.grad.clone()
    here = zigzag_tokens(rank, mesh.size(), n)
    assert torch.equal(x, value)
    assert x.is_leaf
    assert x.requires_grad
    spread = torch.zeros_like(value).index_copy(2, here, grad_shard)
    assert torch.equal(x.grad, torch.ones_like(value) + spread)
    assert_near(context_parallel_unshard(mesh, [out, grad_shard], [2, 2])[0], want)
    assert_near(context_parallel_unshard(mesh, [out, grad_shard], [2, 2])[1], dq + dk + dv)
    x.grad = None
    (graph + (x * 3).sum()).backward()
    assert torch.equal(x.grad, torch.full_like(value, 5.0))


def an_error_restores_buffers(rank: int) -> None:
    mesh, x = mesh_of_all(), torch.arange(8)
    with pytest.raises(ZeroDivisionError), context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
        _ = 1 / 0
    assert torch.equal(x, torch.arange(8))
    q, k, v = qkv(8)
    assert_near(sdpa(q, k, v), single_process(q, k, v, is_causal=False)[0])


def a_buffer_in_two_blocks(rank: int) -> None:
    mesh, x = mesh_of_all(), torch.arange(16)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
        outer = x.clone()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
            assert torch.equal(x, outer[zigzag_tokens(rank, mesh.size(), len(outer))])
        assert torch.equal(x, outer)
        assert torch.equal(context_parallel_unshard(mesh, [x], [0])[0], torch.arange(16))
    assert torch.equal(x, torch.arange(16))


JOBS = [
    any_dim_and_dtype,
    views_are_not_corrupted,
    gradients_of_buffers,
    an_error_restores_buffers,
    a_buffer_in_two_blocks,
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("job", JOBS, ids=[job.__name__ for job in JOBS])
def test_buffers(pools: Pools, job: Callable[..., None], world: int) -> None:
    pools(world).run(job)


WRONG: dict[str, tuple[Callable[[Any, list[torch.Tensor]], Any], str]] = {
    "dims that are missing": (
        lambda mesh, x: context_parallel(mesh, buffers=x, buffer_seq_dims=[2]),
        "3 buffers and 1 buffer_seq_dims",
    ),
    "not a tensor": (
        lambda mesh, x: context_parallel(mesh, buffers=[*x, None], buffer_seq_dims=[2] * 4),
        "buffers are tensors, not NoneType",
    ),
    "no such dim": (
        lambda mesh, x: context_parallel(mesh, buffers=x[:1], buffer_seq_dims=[4]),
        "4 is not a dim of a buffer",
    ),
    "no_restore_buffers of others": (
        lambda mesh, x: context_parallel(mesh, buffers=x, buffer_seq_dims=[2] * 3, no_restore_buffers={x[0].clone()}),
        "not among the buffers",
    ),
    "twice, with different dims": (
        lambda mesh, x: context_parallel(mesh, buffers=[x[0], x[0]], buffer_seq_dims=[1, 2]),
        "given twice",
    ),
    "not a leaf": (
        lambda mesh, x: context_parallel(mesh, buffers=[torch.ones(8, requires_grad=True) * 2], buffer_seq_dims=[0]),
        "_context_parallel_shard, which is differentiable",
    ),
}


def refused(rank: int, name: str) -> None:
    make, message = WRONG[name]
    x = qkv(8)
    before = [one.clone() for one in x]
    with pytest.raises(ValueError, match=message), make(mesh_of_all(), x):
        pass
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_invalid_buffers_are_refused_and_unchanged(pools: Pools, name: str) -> None:
    pools(2).run(refused, name)
