"""Attention of DTensors: of the shards that this rank holds, as a DTensor.

q, k and v are (batch, heads, tokens, dim), with the same placements on one mesh. What is allowed on an axis::

    axis of the mesh                 Shard(2), tokens     Shard(0), batch     Shard(1), heads     Replicate()
    the ranks that split a sequence  yes                  no                  no                  no
    any other (data, tensor, …)      no                   yes                 yes                 yes

A shard of the tokens has the tokens that the *layout* assigns to the rank, in its order. ``distribute_tensor`` gives
the same shards only for ``layout="contiguous"`` and a length that is divisible by the ranks. The mesh need not have the
axis of the sequence, as with tensor parallelism alone: the local tensors then hold this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ringspan.errors import InputError
from ringspan.kernels import Partial
from ringspan.torch_private.dynamo import dynamo_constant

BATCH, HEADS, TOKENS = 0, 1, 2


def attend_shards(
    attend: Callable[[Tensor, Tensor, Tensor], Partial], q: Tensor, k: Tensor, v: Tensor, ranks: tuple[int, ...]
) -> Partial:
    """Call ``attend(q, k, v)`` with the local tensors. ``ranks`` are the processes that split the sequence."""
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        kinds = ", ".join(f"{name} is a {type(x).__name__}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise InputError(f"{kinds}: give q, k and v all as DTensors, or all as plain tensors (x.to_local())")
    mesh, placements = q.device_mesh, q.placements
    if not (k.device_mesh == v.device_mesh == mesh and tuple(k.placements) == tuple(v.placements) == tuple(placements)):
        raise InputError(
            f"q is {tuple(placements)} on {mesh}, k is {tuple(k.placements)} on {k.device_mesh}, v is {tuple(v.placements)} on "
            f"{v.device_mesh}: they must have the same mesh and placements. Redistribute them"
        )
    for axis, placement in enumerate(placements):
        if mesh.size(axis) > 1:  # on an axis of one rank every placement holds everything
            _check_placement(placement, mesh, axis, is_sequence=_ranks_along(mesh, axis) == tuple(sorted(ranks)))
    _check_heads(placements, mesh, k.shape[HEADS])
    out, lse = attend(q.to_local(), k.to_local(), v.to_local())
    whole = (*q.shape[:3], v.shape[3])
    return Partial(_as_dtensor(out, q, whole), _as_dtensor(lse, q, whole[:3]))


def _check_placement(placement: Placement, mesh: DeviceMesh, axis: int, *, is_sequence: bool) -> None:
    name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
    dim = placement.dim if isinstance(placement, Shard) else None
    if is_sequence:
        if dim != TOKENS:
            raise InputError(
                f"q, k and v are {placement} on the axis {name!r} of their mesh, whose ranks split the sequence: they must be "
                f"Shard({TOKENS}), the dim of the tokens. Redistribute them, or make them of this rank's shards with "
                "DTensor.from_local"
            )
        return
    if dim not in (BATCH, HEADS) and placement != Replicate():
        raise InputError(
            f"q, k and v are {placement} on the axis {name!r} of their mesh, whose ranks do not split this sequence: only "
            f"Shard({BATCH}) (batch), Shard({HEADS}) (heads) and Replicate() are exact there. Redistribute them"
        )


def _check_heads(placements: Sequence[Placement], mesh: DeviceMesh, kv_heads: int) -> None:
    ranks = 1  # a plain loop, since torch.compile traces it
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim == HEADS:
            ranks *= mesh.size(axis)
    if kv_heads % ranks:
        raise InputError(
            f"{kv_heads} key heads over the {ranks} ranks that split the heads: queries and their keys must be on one rank. "
            "Repeat the key heads until the ranks divide them"
        )


@dynamo_constant  # a mesh does not change
def _ranks_along(mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(mesh.get_group(axis))))


def _as_dtensor(x: Tensor, like: DTensor, shape: tuple[int, ...]) -> DTensor:
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    # The shape is given and not gathered: ranks may hold different numbers of tokens.
    return DTensor.from_local(x, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride)
