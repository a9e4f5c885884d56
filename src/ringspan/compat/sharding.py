"""Whole sequences to shares and back, out of place."""

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
from ringspan.compat.shard_registry import check_mesh, memory_of
from ringspan.errors import InputError
from ringspan.layouts import Layout
from ringspan.torch_private.process_groups import on_each_simulated_rank
from ringspan.torch_private.pytree import tree_flatten, tree_leaves, tree_unflatten
from ringspan.transports import ProcessGroupTransport

Buffers = Sequence[Any] | Mapping[str, Any]
SeqDims = Sequence[Any] | Mapping[str, Any]


def _context_parallel_shard(
    mesh: DeviceMesh, buffers: Buffers, seq_dims: SeqDims, load_balancer: _LoadBalancer | None = None
) -> Any:
    """This rank's share of each buffer, in the structure of ``buffers``. Differentiable.

    Tensors are cut along their dim of ``seq_dims``; a ``BlockMask`` becomes that of this rank's queries over all keys, in
    the order in which :func:`flex_cp_allgather` brings them (its entry of ``seq_dims`` is ignored). Without a balancer
    shares are contiguous.
    """
    check_mesh(mesh)
    leaves, structure = tree_flatten(buffers, is_leaf=lambda x: isinstance(x, BlockMask))
    dims = tree_leaves(seq_dims)
    if len(buffers) != len(seq_dims) or len(leaves) != len(dims):
        raise InputError(f"{len(leaves)} buffers and {len(dims)} seq_dims: give each buffer its sequence dim, in one structure")
    shares: list[Any] = []
    made: list[tuple[Tensor, Layouts]] = []
    for leaf, given in zip(leaves, dims, strict=True):
        if isinstance(leaf, BlockMask):
            layouts = layouts_of(load_balancer, leaf.seq_lengths[0], mesh.size())
            shares.append(shard_block_mask(leaf, layouts, mesh.get_local_rank()))
        elif isinstance(leaf, Tensor):
            dim = as_dim(leaf, given)
            layouts = layouts_of(load_balancer, leaf.shape[dim], mesh.size())
            shares.append(share_of(leaf, dim, layouts, mesh.get_local_rank()))
            made.append((shares[-1], layouts))
        else:
            raise InputError(f"buffers are tensors and BlockMasks, not {type(leaf).__name__}")
    memory_of(mesh).remember(made)
    return tree_unflatten(shares, structure)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: _LoadBalancer | None = None
) -> list[Tensor]:
    """The whole of each buffer on every rank, in its first order.

    ``load_balancer`` need not be said: it is remembered how sequences of this length were sharded over this mesh. Where
    they are at the same time sharded in several ways, a tensor that is none of the shards themselves needs it.
    """
    if len(buffers) != len(seq_dims):
        raise InputError(f"{len(buffers)} buffers and {len(seq_dims)} seq_dims: give each buffer its sequence dim")
    memory, group = memory_of(mesh), ProcessGroupTransport(mesh)
    whole = []
    for x, given in zip(buffers, seq_dims, strict=True):
        dim = as_dim(x, given)
        counts = tuple(n for (n,) in group.gather_numbers([x.shape[dim]], x.device))
        length = sum(counts)
        layouts = layouts_of(load_balancer, length, group.world) if load_balancer else memory.of(x, length) or in_order(counts)
        if layouts[0].counts != counts:
            raise InputError(
                f"the ranks hold {counts} tokens, but {layouts[0]!r} has {layouts[0].counts}: unshard what was sharded by it"
            )
        rows = torch.cat(group.all_gather_rows(x.movedim(dim, 0).contiguous(), counts)).movedim(0, dim)
        whole.append(picked(rows, dim, [torch.from_numpy(layout.order()).argsort() for layout in layouts]))
    return whole


def in_order(counts: Sequence[int]) -> Layouts:
    """Shares of which nothing is known but their sizes: tokens that nobody rearranged lie rank after rank."""
    return (Layout([[(end - n, end)] for n, end in zip(counts, accumulate(counts), strict=True)], name="contiguous"),)


@on_each_simulated_rank
def share_of(x: Tensor, dim: int, layouts: Layouts, rank: int) -> Tensor:
    """A rank's share of a whole sequence. (Where torch simulates all ranks with local tensors: of each rank.)"""
    return picked(x, dim, [torch.from_numpy(layout.positions(rank)) for layout in layouts])


def picked(x: Tensor, dim: int, tokens: Iterable[Tensor]) -> Tensor:
    """``x`` with these tokens: one list of them for all rows of the batch, or one for each row."""
    each = [row.to(x.device) for row in tokens]
    if len(each) == 1:
        return x.index_select(dim, each[0])
    if dim == 0 or x.shape[0] != len(each):
        raise InputError(
            f"the balancer rearranges each of {len(each)} rows of the batch in its own way, but a buffer of shape "
            f"{tuple(x.shape)} with its sequence on dim {dim} has no such rows: put the batch on dim 0"
        )
    return torch.stack([row.index_select(dim - 1, mine) for row, mine in zip(x, each, strict=True)])


def as_dim(x: Tensor, dim: int) -> int:
    """A sequence dim as a number from 0 up."""
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"{dim} is not a dim of a buffer of shape {tuple(x.shape)}")
    return dim % x.ndim
