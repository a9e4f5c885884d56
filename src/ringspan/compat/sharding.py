"""``_context_parallel_shard`` and ``context_parallel_unshard``: whole sequences to shards and back, out of place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from ringspan.compat.balancers import Layouts, _LoadBalancer, layouts_of
from ringspan.compat.block_masks import shard_block_mask
from ringspan.compat.shard_registry import check_mesh, registry_of
from ringspan.errors import InputError
from ringspan.layouts import Layout
from ringspan.torch_private.process_groups import on_each_simulated_rank
from ringspan.torch_private.pytree import tree_flatten, tree_leaves, tree_unflatten
from ringspan.transports import ProcessGroupTransport

Buffers = Sequence[Any] | Mapping[str, Any]
SeqDims = Sequence[Any] | Mapping[str, Any]

UNSHARD = "context_parallel_unshard"  # the label of its collectives in error messages


def _context_parallel_shard(
    mesh: DeviceMesh, buffers: Buffers, seq_dims: SeqDims, load_balancer: _LoadBalancer | None = None
) -> Any:
    """This rank's shard of each buffer, in the structure of ``buffers``. Differentiable.

    Tensors are split along their dim in ``seq_dims``. A ``BlockMask`` becomes the mask of this rank's queries over all
    keys, in the order in which :func:`flex_cp_allgather` returns them; its entry in ``seq_dims`` is ignored. Without a
    balancer the shards are contiguous.
    """
    check_mesh(mesh)
    leaves, structure = tree_flatten(buffers, is_leaf=lambda x: isinstance(x, BlockMask))
    dims = tree_leaves(seq_dims)
    if len(buffers) != len(seq_dims) or len(leaves) != len(dims):
        raise InputError(f"{len(leaves)} buffers and {len(dims)} seq_dims: give each buffer its sequence dim, in one structure")
    shards: list[Any] = []
    recorded: list[tuple[Tensor, Layouts]] = []
    for leaf, given in zip(leaves, dims, strict=True):
        if isinstance(leaf, BlockMask):
            layouts = layouts_of(load_balancer, leaf.seq_lengths[0], mesh.size())
            shards.append(shard_block_mask(leaf, layouts, mesh.get_local_rank()))
        elif isinstance(leaf, Tensor):
            dim = normalize_dim(leaf, given)
            layouts = layouts_of(load_balancer, leaf.shape[dim], mesh.size())
            shards.append(local_shard(leaf, dim, layouts, mesh.get_local_rank()))
            recorded.append((shards[-1], layouts))
        else:
            raise InputError(f"buffers are tensors and BlockMasks, not {type(leaf).__name__}")
    registry_of(mesh).register_shards(recorded)
    return tree_unflatten(shards, structure)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: _LoadBalancer | None = None
) -> list[Tensor]:
    """Each whole buffer on every rank, with its tokens in their original order.

    ``load_balancer`` can be omitted: the mesh's registry has the layouts by which sequences of this length were
    sharded. It is needed for a tensor that is not itself a shard while sequences of its length are sharded in several
    ways.
    """
    if len(buffers) != len(seq_dims):
        raise InputError(f"{len(buffers)} buffers and {len(seq_dims)} seq_dims: give each buffer its sequence dim")
    registry, group = registry_of(mesh), ProcessGroupTransport(mesh)
    whole = []
    for x, given in zip(buffers, seq_dims, strict=True):
        dim = normalize_dim(x, given)
        counts = tuple(count for (count,) in group.all_gather_ints([x.shape[dim]], x.device, label=UNSHARD))
        length = sum(counts)
        if load_balancer:
            layouts = layouts_of(load_balancer, length, group.world)
        else:
            layouts = registry.layouts_to_unshard(x, length) or contiguous_of_counts(counts)
        if layouts[0].counts != counts:
            raise InputError(
                f"the ranks hold {counts} tokens, but {layouts[0]!r} has {layouts[0].counts}: unshard with the layout that "
                "sharded this tensor"
            )
        rows = torch.cat(group.all_gather_rows(x.movedim(dim, 0).contiguous(), counts, label=UNSHARD)).movedim(0, dim)
        whole.append(select_tokens(rows, dim, [torch.from_numpy(layout.order()).argsort() for layout in layouts]))
    return whole


def contiguous_of_counts(counts: Sequence[int]) -> Layouts:
    """Contiguous shards of these sizes, in rank order: the layout of tokens that were not sharded by this module."""
    return (Layout([[(end - n, end)] for n, end in zip(counts, accumulate(counts), strict=True)], name="contiguous"),)


@on_each_simulated_rank
def local_shard(x: Tensor, dim: int, layouts: Layouts, rank: int) -> Tensor:
    """A rank's shard of a whole sequence. Of a LocalTensor, which simulates all ranks, the shard of each rank."""
    return select_tokens(x, dim, [torch.from_numpy(layout.positions(rank)) for layout in layouts])


def select_tokens(x: Tensor, dim: int, tokens: Iterable[Tensor]) -> Tensor:
    """The given tokens of ``x``: one index tensor for all rows of the batch, or one for each row."""
    indices = [row.to(x.device) for row in tokens]
    if len(indices) == 1:
        return x.index_select(dim, indices[0])
    if dim == 0 or x.shape[0] != len(indices):
        raise InputError(
            f"the balancer orders each of {len(indices)} batch rows differently, but a buffer of shape {tuple(x.shape)} with "
            f"its sequence on dim {dim} does not have these rows: put the batch on dim 0"
        )
    return torch.stack([row.index_select(dim - 1, index) for row, index in zip(x, indices, strict=True)])


def normalize_dim(x: Tensor, dim: int) -> int:
    """The dim as a non-negative index."""
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"{dim} is not a dim of a buffer of shape {tuple(x.shape)}")
    return dim % x.ndim
