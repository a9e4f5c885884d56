"""``context_parallel``: shards buffers in place and makes attention in the block context-parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.compat.attention import BlockMode
from ringspan.compat.buffers import check_buffer, restore_buffer, shard_in_place
from ringspan.compat.call_settings import settings_of
from ringspan.compat.context_cache import ContextCache
from ringspan.compat.sharding import check_order_of_block, normalize_dim
from ringspan.compat.shardings import CONTIGUOUS, HEAD_TAIL
from ringspan.errors import InputError
from ringspan.layouts import contiguous, zigzag
from ringspan.masks import full


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Set[Tensor] | None = None,
) -> Iterator[None]:
    """Shard the buffers in place, and make attention in the block attend to the keys of all ranks.

    On exit each buffer gets its own memory back, except ``no_restore_buffers``. The gradient of a buffer then has the
    shape of the whole sequence and is zero for other ranks' tokens; ``backward()`` must be called inside the block.
    Shards are zigzag (torch: head-tail), or contiguous if ``_cp_options.enable_load_balance`` is off. Without buffers,
    the layouts are those of the enclosing block or, if there is none, what ``_cp_options.enable_load_balance`` says.
    """
    dims = _dims_by_buffer(buffers or (), buffer_seq_dims or ())
    kept = {id(buffer) for buffer in no_restore_buffers or ()}
    if not kept <= dims.keys():
        raise InputError("no_restore_buffers has a tensor that is not among the buffers: give the same objects in both")
    contexts, rank = ContextCache(mesh), mesh.get_local_rank()
    is_balanced = settings_of(contexts.shardings).is_balanced
    make, order = (zigzag, HEAD_TAIL) if is_balanced else (contiguous, CONTIGUOUS)
    layouts = {length: (make(full(length), mesh.size()),) for length in {x.shape[dim] for x, dim in dims.values()}}
    for of_length in layouts.values():
        check_order_of_block(mesh, of_length)
    with ExitStack() as on_exit:
        for buffer, dim in dims.values():
            sharded = shard_in_place(buffer, dim, layouts[buffer.shape[dim]][0], rank)
            if id(buffer) not in kept:
                on_exit.callback(restore_buffer, sharded, rank)
        for length, (layout,) in layouts.items():  # the results of the block live on, in its order
            on_exit.callback(contexts.shardings.record_block, order, length, is_even=len(set(layout.counts)) == 1)
        with BlockMode(contexts, layouts):
            yield


def _dims_by_buffer(buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> dict[int, tuple[Tensor, int]]:
    """Return each buffer once, by its id, with its sequence dim. Raises before any buffer is changed."""
    if len(buffers) != len(seq_dims):
        raise InputError(f"{len(buffers)} buffers and {len(seq_dims)} buffer_seq_dims: give each buffer its sequence dim")
    dims: dict[int, tuple[Tensor, int]] = {}
    for buffer, given in zip(buffers, seq_dims, strict=True):
        check_buffer(buffer)
        dim = normalize_dim(buffer, given)
        if dims.setdefault(id(buffer), (buffer, dim))[1] != dim:
            raise InputError(f"a buffer of shape {tuple(buffer.shape)} is given twice, with different sequence dims")
    return dims
