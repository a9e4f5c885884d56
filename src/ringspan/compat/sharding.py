"""``_context_parallel_shard`` and ``context_parallel_unshard``: whole sequences to shards and back, out of place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from ringspan.compat.balancers import Layouts, _LoadBalancer, layouts_of, same_order
from ringspan.compat.block_masks import shard_block_mask
from ringspan.compat.call_settings import settings_of
from ringspan.compat.default_layouts import default_layouts, order_of, record_sharding
from ringspan.compat.meshes import check_mesh, innermost_block
from ringspan.compat.shardings import shardings_of
from ringspan.errors import InputError
from ringspan.torch_private.process_groups import on_each_simulated_rank
from ringspan.torch_private.pytree import tree_flatten, tree_leaves, tree_unflatten
from ringspan.transports import ProcessGroupTransport

Buffers = Sequence[Any] | Mapping[str, Any]
SeqDims = Sequence[Any] | Mapping[str, Any]

UNSHARD = "context_parallel_unshard"  # the label of its collectives in error messages


def _context_parallel_shard(
    mesh: DeviceMesh, buffers: Buffers, seq_dims: SeqDims, load_balancer: _LoadBalancer | None = None
) -> Any:
    """Return this rank's shard of each buffer, in the structure of ``buffers``. Differentiable.

    Tensors are split along their dim in ``seq_dims``. A ``BlockMask`` becomes the mask of this rank's queries over all
    keys, in the order in which :func:`flex_cp_allgather` returns them; its entry in ``seq_dims`` is ignored. Without a
    balancer the shards are contiguous. ``_cp_options.enable_load_balance`` is set to whether there is a balancer.
    """
    check_mesh(mesh)
    leaves, structure = tree_flatten(buffers, is_leaf=lambda x: isinstance(x, BlockMask))
    dims = tree_leaves(seq_dims)
    if len(buffers) != len(seq_dims) or len(leaves) != len(dims):
        raise InputError(f"{len(leaves)} buffers and {len(dims)} seq_dims: give each buffer its sequence dim, in one structure")
    shards: list[Any] = []
    layouts_of_tensors: list[Layouts] = []
    for leaf, given in zip(leaves, dims, strict=True):
        if isinstance(leaf, BlockMask):
            shards.append(shard_mask(mesh, leaf, load_balancer))
        elif isinstance(leaf, Tensor):
            dim = normalize_dim(leaf, given)
            layouts = layouts_of(load_balancer, leaf.shape[dim], mesh.size())
            check_order_of_block(mesh, layouts)
            shards.append(local_shard(leaf, dim, layouts, mesh.get_local_rank()))
            layouts_of_tensors.append(layouts)
        else:
            raise InputError(f"buffers are tensors and BlockMasks, not {type(leaf).__name__}")
    record_sharding(shardings_of(mesh.get_group()), load_balancer, layouts_of_tensors)
    return tree_unflatten(shards, structure)


def shard_mask(mesh: DeviceMesh, mask: BlockMask, balancer: _LoadBalancer | None) -> BlockMask:
    """Return this rank's shard of a mask. A balancer needs queries and keys of one length, since it orders both."""
    q_length, kv_length = mask.seq_lengths
    layouts = kv_layouts = layouts_of(balancer, q_length, mesh.size())
    if q_length != kv_length:
        if balancer is not None:
            raise InputError(
                f"this BlockMask has {q_length} queries and {kv_length} keys, which {type(balancer).__name__} cannot order in "
                "one way: shard it, the queries and the keys without a balancer"
            )
        kv_layouts = layouts_of(None, kv_length, mesh.size())
    return shard_block_mask(mask, layouts, mesh.get_local_rank(), kv_layouts, order=order_of(balancer, layouts))


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: _LoadBalancer | None = None
) -> list[Tensor]:
    """Return each whole buffer on every rank, with its tokens in their original order.

    Without a balancer the order of the shards is that of the open ``context_parallel`` block, for sequences of the
    length of one of its buffers. Else it is the order of all shardings and blocks of this length. If there were several
    orders, an error asks for the balancer. If there were none, ``_cp_options.enable_load_balance`` decides: head-tail,
    or contiguous.
    """
    check_mesh(mesh)
    if len(buffers) != len(seq_dims):
        raise InputError(f"{len(buffers)} buffers and {len(seq_dims)} seq_dims: give each buffer its sequence dim")
    group, whole = ProcessGroupTransport(mesh), []
    for x, given in zip(buffers, seq_dims, strict=True):
        dim = normalize_dim(x, given)
        counts = tuple(count for (count,) in group.all_gather_ints([x.shape[dim]], x.device, label=UNSHARD))
        layouts = layouts_of(load_balancer, sum(counts), group.world) if load_balancer else _layouts_to_unshard(mesh, counts)
        if layouts[0].counts != counts:
            raise InputError(
                f"the ranks hold {counts} tokens, but {layouts[0]!r} has {layouts[0].counts}: give the load_balancer= "
                "with which this tensor was sharded"
            )
        digests = f"layouts {', '.join(sorted({layout.digest for layout in layouts}))}"
        rows = torch.cat(group.all_gather_rows(x.movedim(dim, 0).contiguous(), counts, label=UNSHARD, options=digests)).movedim(
            0, dim
        )
        whole.append(select_tokens(rows, dim, [torch.from_numpy(layout.order()).argsort() for layout in layouts]))
    return whole


def _layouts_to_unshard(mesh: DeviceMesh, counts: tuple[int, ...]) -> Layouts:
    own = (innermost_block(mesh) or {}).get(sum(counts))
    if own is not None:
        return own
    shardings = shardings_of(mesh.get_group())
    orders = shardings.of_results(sum(counts)) or settings_of(shardings).orders_of(sum(counts))
    return default_layouts(counts, orders, remedy="give load_balancer=")


def check_order_of_block(mesh: DeviceMesh, layouts: Layouts) -> None:
    """Raise if the open block has another order for this length: its attention would take these tensors for its own."""
    own = (innermost_block(mesh) or {}).get(layouts[0].length, layouts)
    if not same_order(own, layouts):
        raise InputError(
            f"the open context_parallel block has sequences of {own[0].length} tokens in the order of {own[0]!r}, but this one "
            f"would be in that of {layouts[0]!r}: shard it outside of the block, or with the order of the block"
        )


@on_each_simulated_rank
def local_shard(x: Tensor, dim: int, layouts: Layouts, rank: int) -> Tensor:
    """Return a rank's shard of a whole sequence. Of a LocalTensor, which simulates all ranks, that of each rank."""
    return select_tokens(x, dim, [torch.from_numpy(layout.positions(rank)) for layout in layouts])


def select_tokens(x: Tensor, dim: int, tokens: Iterable[Tensor]) -> Tensor:
    """Return the given tokens of ``x``. There is one index tensor for all rows of the batch, or one for each row."""
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
    """Return the dim as a non-negative index."""
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"{dim} is not a dim of a buffer of shape {tuple(x.shape)}")
    return dim % x.ndim
