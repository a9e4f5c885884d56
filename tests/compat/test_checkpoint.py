"""Activation checkpointing in a ``context_parallel`` block and in a parallelized module, over gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.compat import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _HeadTailLoadBalancer,
    _templated_ring_attention,
    context_parallel,
)
from ringspan.testing.assertions import assert_close
from tests.compat.jobs import mesh_of_all
from tests.conftest import Pools

N, E = 24, 16


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.attends = nn.Linear(E, 3 * E), nn.Linear(E, E), Attends()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, E // 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attends(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers, self.reentrant = nn.Linear(E, E), nn.ModuleList([Layer(), Layer()]), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def whole_sequence() -> Tensor:
    return torch.randn(2, N, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model: Model) -> list[Tensor]:
    grads = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        grads.append(parameter.grad)
    return grads


def expected() -> list[Tensor]:
    model = Model(None).double()
    model(whole_sequence()).square().sum().backward()
    return gradients(model)


def check(model: Model) -> None:
    for grad, exact in zip(gradients(model), expected(), strict=True):
        dist.all_reduce(grad)
        assert_close(grad, exact, atol=1e-11)


def in_a_block(rank: int, reentrant: bool, backward_in_block: bool) -> None:
    mesh, model, x = mesh_of_all(), Model(reentrant).double(), whole_sequence()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
        loss = model(x).square().sum()
        if backward_in_block:
            loss.backward()
    if not backward_in_block:
        loss.backward()
    check(model)


def in_modules(rank: int, reentrant: bool, backward_in_block: bool) -> None:
    """The style is applied to the attention of each layer, and there is no block."""
    mesh, model = mesh_of_all(), Model(reentrant).double()
    style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"attends": style})
    (x,) = _context_parallel_shard(mesh, [whole_sequence()], [1], _HeadTailLoadBalancer(N, dist.get_world_size(), "cpu"))
    model(x).square().sum().backward()
    check(model)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize(
    ("job", "backward_in_block"),
    [(in_a_block, True), (in_a_block, False), (in_modules, False)],
    ids=["backward in the block", "backward after it", "modules"],
)
def test_gradients_are_those_of_one_process(
    pools: Pools, job: object, backward_in_block: bool, reentrant: bool, world: int
) -> None:
    pools(world).run(job, reentrant, backward_in_block)


def styled_model(mesh: DeviceMesh, reentrant: bool | None) -> Model:
    model, style = Model(reentrant).double(), _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"attends": style})
    return model


def head_tail_shard(mesh: DeviceMesh) -> Tensor:
    (x,) = _context_parallel_shard(mesh, [whole_sequence()], [1], _HeadTailLoadBalancer(N, mesh.size(), "cpu"))
    assert isinstance(x, Tensor)
    return x


def in_styled_modules(mesh: DeviceMesh, reentrant: bool) -> tuple[Model, Tensor]:
    model = styled_model(mesh, reentrant)
    return model, model(head_tail_shard(mesh))


def in_styled_modules_in_a_block(mesh: DeviceMesh, reentrant: bool) -> tuple[Model, Tensor]:
    model, x = styled_model(mesh, reentrant), whole_sequence()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
        return model, model(x)


def in_a_block_without_buffers(mesh: DeviceMesh, reentrant: bool) -> tuple[Model, Tensor]:
    model, x = Model(reentrant).double(), head_tail_shard(mesh)
    with context_parallel(mesh):
        return model, model(x)


def in_a_block_inside_the_checkpoint(mesh: DeviceMesh, reentrant: bool) -> tuple[Model, Tensor]:
    """The recomputation opens the block again, and shards its buffer again."""
    model, x = Model(None).double(), whole_sequence()

    def layers(x: Tensor) -> Tensor:
        positions = torch.arange(N)
        with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
            return model(x[:, positions.clone()])

    return model, checkpoint(layers, x.requires_grad_(), use_reentrant=reentrant)


def by_ring_attention(mesh: DeviceMesh, reentrant: bool) -> tuple[Model, Tensor]:
    model = Model(reentrant).double()
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.attends.forward = lambda q, k, v: _templated_ring_attention(  # type: ignore[method-assign]
            mesh.get_group(), 2, None, q, k, v, is_causal=True
        )[0]
    return model, model(head_tail_shard(mesh))


def compiled_in_checkpoints(mesh: DeviceMesh, reentrant: bool) -> tuple[Model, Tensor]:
    torch._dynamo.reset()
    model = styled_model(mesh, None)
    x = model.embed(head_tail_shard(mesh))
    for layer in model.layers:
        x = checkpoint(compiled(layer), x, use_reentrant=reentrant)
    return model, x


FORWARD = {
    job.__name__: job
    for job in (
        in_styled_modules,
        in_styled_modules_in_a_block,
        in_a_block_without_buffers,
        in_a_block_inside_the_checkpoint,
        by_ring_attention,
        compiled_in_checkpoints,
    )
}


def changed_before_backward(rank: int, name: str, reentrant: bool, change: str) -> None:
    """The forward pass is in head-tail order. Then something says that tensors are contiguous."""
    mesh = mesh_of_all()
    model, out = FORWARD[name](mesh, reentrant)
    if change == "assignment":
        _cp_options.enable_load_balance = False
    else:
        _context_parallel_shard(mesh, [whole_sequence()], [1])
    out.square().sum().backward()
    check(model)


@pytest.mark.parametrize("change", ["assignment", "sharding"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", FORWARD)
def test_recomputation_has_the_settings_of_the_forward_pass(pools: Pools, name: str, reentrant: bool, change: str) -> None:
    pools(2).run(changed_before_backward, name, reentrant, change)


def changed_inside(rank: int, reentrant: bool) -> None:
    mesh, attends = mesh_of_all(), Attends()
    parallelize_module(attends, mesh, _ContextParallel(2, _ContextParallel.AttentionType.SDPA))
    x = torch.ones(1, 2, 4, 8, requires_grad=True)

    def layers(x: Tensor) -> Tensor:
        _cp_options.enable_load_balance = True
        x = attends(x, x, x)
        _cp_options.enable_load_balance = False
        return attends(x, x, x)

    with pytest.raises(rs.UnplannedAttention, match="between two attention calls of one activation checkpoint"):
        checkpoint(layers, x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_settings_that_change_inside_a_checkpoint_are_refused(pools: Pools, reentrant: bool) -> None:
    pools(2).run(changed_inside, reentrant)


def changed_in_one_graph(rank: int, change: str) -> None:
    torch._dynamo.reset()
    mesh = mesh_of_all()
    model = styled_model(mesh, None)
    x = model.embed(head_tail_shard(mesh))
    for layer in model.layers:
        x = side_effects_allowed(layer)(x)
    if change == "assignment":
        _cp_options.enable_load_balance = False
    else:
        _context_parallel_shard(mesh, [whole_sequence()], [1])
    x.square().sum().backward()
    check(model)


@pytest.mark.parametrize("change", ["assignment", "sharding"])
def test_a_compiled_checkpoint_has_the_settings_of_the_forward_pass(pools: Pools, change: str) -> None:
    pools(2).run(changed_in_one_graph, change)


def compiled_layers(rank: int, way: str) -> None:
    """Layers with the style are compiled inside a checkpoint, or with the checkpoint."""
    torch._dynamo.reset()
    mesh, model = mesh_of_all(), Model(None).double()
    style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"attends": style})
    (x,) = _context_parallel_shard(mesh, [whole_sequence()], [1], _HeadTailLoadBalancer(N, dist.get_world_size(), "cpu"))
    x = model.embed(x)
    for layer in model.layers:
        x = COMPILED[way](layer)(x)
    x.square().sum().backward()
    check(model)


def compiled(function: Callable[..., Tensor], fullgraph: bool = True) -> Callable[..., Tensor]:
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


def side_effects_allowed(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Dynamo regards a mode that is opened inside a checkpoint as a side effect."""

    def call(x: Tensor) -> Tensor:
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
            return function(x)

    function = compiled(lambda x: checkpoint(layer, x, use_reentrant=False))
    return call


COMPILED: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "compiled layer in a checkpoint": lambda layer: partial(checkpoint, compiled(layer), use_reentrant=False),
    "compiled layer in a reentrant checkpoint": lambda layer: partial(checkpoint, compiled(layer), use_reentrant=True),
    "checkpoint in a compiled function": lambda layer: compiled(lambda x: checkpoint(layer, x, use_reentrant=False), False),
    "checkpoint in a compiled function, in one graph": side_effects_allowed,
}


@pytest.mark.parametrize("way", COMPILED)
def test_compiled_layers(pools: Pools, way: str) -> None:
    pools(2).run(compiled_layers, way)
