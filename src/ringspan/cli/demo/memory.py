"""The memory of a rank for one step, measured on groups of 1, 2, 4, … of the demo's processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import ringspan as rs
from ringspan.cli.demo.model import build
from ringspan.cli.demo.training import Training, token_losses
from ringspan.planner import memory_bytes
from ringspan.plans.data import PHASES


def worlds(world: int) -> list[int]:
    """Return the group sizes to measure.

    >>> worlds(4), worlds(6), worlds(1)
    ([1, 2, 4], [1, 2, 4, 6], [1])
    """
    return sorted({world, *(2**n for n in range(world.bit_length()) if 2**n <= world)})


def measure_memory(rank: int, training: Training) -> dict[int, int]:
    """Return bytes of this rank by the size of the group: activations kept for backward, and the buffers of attention.

    This is the job of one worker of the pool. Parameters and optimiser are not counted: they are the same on all ranks,
    and FSDP shards them.
    """
    model = build(training.config, training.seed)
    pack, config = training.packs[0], training.config
    shape = rs.Shape(heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype="float32")
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    for size in worlds(dist.get_world_size()):
        group = dist.new_group(list(range(size)))  # every process makes every group
        if rank >= size:
            continue
        cp = rs.ContextParallel(group, rs.documents(pack.lengths))
        tokens, labels, weights = cp.shard(*pack.tensors(), dim=1)
        kept: dict[int, int] = {}

        def note(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        with saved_tensors_hooks(note, _unchanged):
            with cp:
                logits = model(tokens, positions=cp.positions())
            cp.mean(token_losses(logits, labels), weights)
        found[size] = sum(kept.values()) + max(memory_bytes(cp.plan, shape, phase) for phase in PHASES)
    return found


def _unchanged(x: Any) -> Any:
    return x
