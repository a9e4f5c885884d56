"""A checkpoint around a parallelized module attends again in the blocks of its forward pass, not in those of backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.compat import _context_parallel_shard, _ContextParallel, _cp_options, context_parallel, context_parallel_unshard
from tests.compat.jobs import assert_near, mesh_of_all, qkv
from tests.compat.test_checkpoint import side_effects_allowed
from tests.conftest import Pools

N = 32


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x.sin(), x.cos(), x, is_causal=True)


def expected() -> Tensor:
    x = qkv(N)[0].double().requires_grad_()
    (grad,) = torch.autograd.grad(Layer()(x).square().sum(), x)
    return grad


WAYS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "reentrant": lambda layer: partial(checkpoint, layer, use_reentrant=True),
    "not reentrant": lambda layer: partial(checkpoint, layer, use_reentrant=False),
    "compiled, in one graph": side_effects_allowed,
}


def layer_with_style(mesh: DeviceMesh, way: str) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    layer = parallelize_module(Layer(), mesh, _ContextParallel(2, _ContextParallel.AttentionType.SDPA))
    return WAYS[way](layer)


def check(mesh: DeviceMesh, x: Tensor) -> None:
    """The tensors of these tests are contiguous."""
    assert x.grad is not None
    _cp_options.enable_load_balance = False
    assert_near(context_parallel_unshard(mesh, [x.grad], [2])[0], expected())


def backward_in_another_block(rank: int, way: str) -> None:
    mesh = mesh_of_all()
    layer, (x,) = layer_with_style(mesh, way), _context_parallel_shard(mesh, qkv(N)[:1], [2])
    out = layer(x.requires_grad_())
    _cp_options.enable_load_balance = True
    with context_parallel(mesh, buffers=[torch.arange(N)], buffer_seq_dims=[0]):  # in head-tail order
        out.square().sum().backward()
    check(mesh, x)


def backward_after_the_block(rank: int, way: str) -> None:
    mesh, (x, *_) = mesh_of_all(), qkv(N)
    layer = layer_with_style(mesh, way)
    _cp_options.enable_load_balance = False
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], no_restore_buffers={x}):
        _cp_options.enable_load_balance = True  # not read: the block knows its order
        out = layer(x.requires_grad_())
    out.square().sum().backward()
    check(mesh, x)


@pytest.mark.parametrize("way", WAYS)
def test_backward_in_another_block(pools: Pools, way: str) -> None:
    pools(2).run(backward_in_another_block, way)


@pytest.mark.parametrize("way", WAYS)
def test_backward_after_the_block(pools: Pools, way: str) -> None:
    pools(2).run(backward_after_the_block, way)


def sharding_in_a_checkpoint(rank: int, reentrant: bool) -> None:
    """Sharding and unsharding inside the checkpointed function are not affected by the block of backward either."""
    mesh, (x, *_) = mesh_of_all(), qkv(N)
    seen = []

    def shards(x: Tensor) -> Tensor:
        (shard,) = _context_parallel_shard(mesh, [x], [2])
        seen.append(context_parallel_unshard(mesh, [shard], [2])[0])
        return shard * shard

    out = checkpoint(shards, x.requires_grad_(), use_reentrant=reentrant)
    vars(_cp_options)["enable_load_balance"] = True
    with context_parallel(mesh, buffers=[torch.arange(N)], buffer_seq_dims=[0]):
        out.sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[1], x)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_sharding_in_a_checkpoint(pools: Pools, reentrant: bool) -> None:
    pools(2).run(sharding_in_a_checkpoint, reentrant)


def test_equal_calls_of_two_tasks_are_refused() -> None:
    """Which of two blocks a recomputation belongs to is not known if two tasks made the call in one state."""
    from ringspan.compat.shardings import States

    states, one, two = States(), {8: ("layouts of one block",)}, {8: ("layouts of another",)}
    assert states.block_of_call(0, ("call",), one) is one
    states.note(True)
    assert states.block_of_call(0, ("call",), two) is one
    assert states.block_of_call(0, ("another call",), two) is two
    assert states.block_of_call(1, ("call",), one) is one
    assert states.block_of_call(1, ("call",), two) is two
    states.note(False)
    with pytest.raises(rs.InputError, match="several tasks"):
        states.block_of_call(1, ("call",), one)
