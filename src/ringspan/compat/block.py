"""``context_parallel``: buffers are sharded in place, and attention in the block sees all ranks' keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.compat.attention import MaskFromTheCall
from ringspan.compat.buffers import check_buffer, give_back, lend
from ringspan.compat.contexts import Contexts
from ringspan.compat.options import _cp_options
from ringspan.compat.shard_registry import memory_of
from ringspan.compat.sharding import as_dim
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
    """Inside the block, ``buffers`` are this rank's share of themselves and ``F.scaled_dot_product_attention`` is exact over
    all ranks, causal where the call says so.

    Buffers get their own memory back in the end, except ``no_restore_buffers``. A buffer's gradient, for which ``backward()``
    must be called inside, is then one of the whole, zero for other ranks' tokens. The shares are head and tail, or contiguous
    where ``_cp_options.enable_load_balance`` is off.
    """
    dims = _checked(buffers or (), buffer_seq_dims or ())
    kept = {id(buffer) for buffer in no_restore_buffers or ()}
    if not kept <= dims.keys():
        raise InputError("no_restore_buffers has a tensor that is none of the buffers: give the same objects in both")
    make = zigzag if _cp_options.enable_load_balance else contiguous
    layouts = {length: (make(full(length), mesh.size()),) for length in {x.shape[dim] for x, dim in dims.values()}}
    memory, mode, rank = memory_of(mesh), MaskFromTheCall(Contexts(mesh), layouts), mesh.get_local_rank()
    with ExitStack() as at_the_end:
        for buffer, dim in dims.values():
            before = memory.shard(buffer)
            lent = lend(buffer, dim, layouts[buffer.shape[dim]][0], rank)
            memory.mark(buffer, (lent.layout,))
            if id(buffer) not in kept:
                at_the_end.callback(memory.mark, buffer, before)
                at_the_end.callback(give_back, lent, rank)
        at_the_end.callback(memory.keep, layouts)
        with mode:
            yield


def _checked(buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> dict[int, tuple[Tensor, int]]:
    """Each buffer once, by its id, with its sequence dim; or an error, before anything is changed."""
    if len(buffers) != len(seq_dims):
        raise InputError(f"{len(buffers)} buffers and {len(seq_dims)} buffer_seq_dims: give each buffer its sequence dim")
    dims: dict[int, tuple[Tensor, int]] = {}
    for buffer, given in zip(buffers, seq_dims, strict=True):
        check_buffer(buffer)
        dim = as_dim(buffer, given)
        if dims.setdefault(id(buffer), (buffer, dim))[1] != dim:
            raise InputError(f"a buffer of shape {tuple(buffer.shape)} is given twice, with different sequence dims")
    return dims


def _enable_context_parallel_dispatcher() -> None:
    """Nothing needs to be switched on: a block, or a module that was made parallel, catches its own attention calls."""


def _disable_context_parallel_dispatcher() -> None:
    """Nothing was switched on."""
