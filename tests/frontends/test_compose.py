"""Context parallelism together with DDP, FSDP, tensor parallelism, compilation and checkpointing.

The loss and every gradient are compared with those of one process. Each combination runs on 2 × 2 processes. With a
data axis, each replica has one of two sequences. Without one, a process runs both in turn and accumulates gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import ringspan as rs
from tests.conftest import Pools
from tests.frontends.small_model import LENGTHS, Model, N, masks, model, rotation, sequences, token_losses, truth
from tests.meshes import cpu_mesh

Found = tuple[float, dict[str, Tensor], int]


def step(
    whole: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, averaged: bool = False, context: Any = None
) -> tuple[float, int]:
    """Forward and backward of this process's sequences: the loss, and the bytes that attention sent.

    ``averaged``: gradients will be averaged over ranks. ``context``: the context in which a layer is recomputed.
    """
    has_data_axis = "dp" in (mesh.mesh_dim_names or ())
    taken = [mesh.get_local_rank("dp")] if has_data_axis else [0, 1]
    over = mesh["dp", "cp"] if has_data_axis else mesh["cp"]
    total = sum((rs.shift_labels(tokens, documents=n) >= 0).sum() for tokens, n in zip(sequences(), LENGTHS, strict=True))
    found, sent = 0.0, 0
    for tokens, lengths in ((sequences()[i].to(mesh.device_type), LENGTHS[i]) for i in taken):
        far, near = masks(lengths)
        # No fast kernel of a GPU computes in float64.
        cp = rs.ContextParallel(mesh["cp"], far, backend="auto" if mesh.device_type == "cpu" else "reference")
        layers[1].block = cp.with_mask(near)
        for layer in layers:
            if context is not None:
                layer.context_fn = context(cp)
        labels = rs.shift_labels(tokens, documents=lengths)
        mine, labels = cp.shard(tokens, labels, dim=1)
        with cp:
            logits = whole(mine, *rotation(cp.positions(documents=lengths).to(mesh.device_type)))
        losses = token_losses(logits, labels)
        loss = cp.sum(losses, over=over, grads="averaged" if averaged else "summed") / total
        loss.backward()
        found += loss.item()
        sent += cp.group.traffic.sent + layers[1].block.group.traffic.sent
    return found, sent


def gradients(whole: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in whole.named_parameters()
        if p.grad is not None
    }


def alone(mesh: DeviceMesh) -> Found:
    """Context parallelism alone, with gradient accumulation."""
    whole = model().to(mesh.device_type)
    loss, sent = step(whole, whole.layers, mesh)
    rs.ContextParallel(mesh["cp"], rs.causal(N)).sum_gradients(whole.parameters())
    return loss, gradients(whole), sent


def ddp(mesh: DeviceMesh) -> Found:
    inner = model().to(mesh.device_type)
    whole = DistributedDataParallel(inner)
    loss, sent = step(whole, inner.layers, mesh, averaged=True)
    return loss, gradients(whole), sent


def fsdp(mesh: DeviceMesh, wrap: Callable[[Model], Any] = lambda whole: None) -> Found:
    whole = model().to(mesh.device_type)
    wrap(whole)
    ranks = mesh["dp", "cp"]._flatten("dp_cp")
    for layer in whole.layers:
        fully_shard(layer, mesh=ranks)
    fully_shard(whole, mesh=ranks)
    loss, sent = step(whole, whole.layers, mesh, averaged=True)
    return loss, gradients(whole), sent


def fsdp_of_compiled_layers(mesh: DeviceMesh) -> Found:
    torch._dynamo.reset()

    def compiled(whole: Model) -> None:
        for layer in whole.layers:
            layer.compile(backend="aot_eager", fullgraph=True)

    return fsdp(mesh, compiled)


HEADS_OVER_RANKS = {
    **{name: ColwiseParallel() for name in ("q", "k", "v", "up")},
    **{name: RowwiseParallel() for name in ("out", "down")},
}
# If q, k and v stay DTensors, the rotary tables must be DTensors too.
HEADS_AS_DTENSORS = {**HEADS_OVER_RANKS, **{name: ColwiseParallel(use_local_output=False) for name in "qkv"}}
TABLES_AS_DTENSORS = (None, Replicate(), Replicate())


def tensor_parallel(mesh: DeviceMesh, as_dtensors: bool = False) -> Found:
    whole = model()
    for layer in whole.layers:
        parallelize_module(layer, mesh["tp"], HEADS_AS_DTENSORS if as_dtensors else HEADS_OVER_RANKS)
        if as_dtensors:
            tables = PrepareModuleInput(input_layouts=TABLES_AS_DTENSORS, desired_input_layouts=TABLES_AS_DTENSORS)
            parallelize_module(layer, mesh["tp"], tables)
    loss, sent = step(whole, whole.layers, mesh)
    rs.ContextParallel(mesh["cp"], rs.causal(N)).sum_gradients(whole.parameters())
    return loss, gradients(whole), sent


def fsdp_and_tensor_parallel(mesh: DeviceMesh) -> Found:
    whole = model()
    for layer in whole.layers:
        parallelize_module(layer, mesh["tp"], HEADS_OVER_RANKS)
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(whole, mesh=mesh["cp"])
    loss, sent = step(whole, whole.layers, mesh, averaged=True)
    return loss, gradients(whole), sent


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.block: Any = nullcontext()
        self.context_fn: Any = None

    def forward(self, *args: Tensor) -> Tensor:
        self.layer.block = self.block
        return checkpoint(self.layer, *args, use_reentrant=False, context_fn=self.context_fn)


def save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.ringspan.attend.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(mesh: DeviceMesh, policy: Any = None) -> Found:
    whole = model()
    layers = nn.ModuleList(Checkpointed(layer) for layer in whole.layers)
    whole.layers = layers
    loss, sent = step(whole, layers, mesh, context=lambda cp: partial(cp.checkpoint_context, policy))
    rs.ContextParallel(mesh["cp"], rs.causal(N)).sum_gradients(whole.parameters())
    return loss, {name.replace(".layer.", "."): grad for name, grad in gradients(whole).items()}, sent


WAYS: dict[str, tuple[tuple[str, str], Callable[[DeviceMesh], Found]]] = {
    "alone": (("cp", "rest"), alone),
    "DDP": (("dp", "cp"), ddp),
    "FSDP": (("dp", "cp"), fsdp),
    "FSDP, compiled": (("dp", "cp"), fsdp_of_compiled_layers),
    "TP": (("cp", "tp"), tensor_parallel),
    "TP, DTensors": (("cp", "tp"), partial(tensor_parallel, as_dtensors=True)),
    "FSDP and TP": (("cp", "tp"), fsdp_and_tensor_parallel),
    "checkpoint": (("cp", "rest"), checkpointed),
    "selective checkpoint": (("cp", "rest"), partial(checkpointed, policy=save_attention)),
}


def run(rank: int, way: str) -> Found:
    axes, train = WAYS[way]
    return train(cpu_mesh((2, 2), axes))


@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_those_of_one_process(pools: Pools, way: str) -> None:
    loss, grads = truth()
    for found, theirs, _ in pools(4).run(run, way):
        assert found == pytest.approx(loss, rel=1e-12)
        assert theirs.keys() == grads.keys()
        for name, grad in grads.items():
            assert torch.allclose(theirs[name], grad, rtol=0, atol=1e-12), name


def test_saved_attention_is_not_communicated_again(pools: Pools) -> None:
    sent = {way: pools(4).run(run, way)[0][2] for way in ("alone", "checkpoint", "selective checkpoint")}
    assert sent["alone"] == sent["selective checkpoint"] < sent["checkpoint"]
