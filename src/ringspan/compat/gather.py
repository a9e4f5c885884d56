"""``flex_cp_allgather``: all-gather keys and values, as a custom operator for autograd and torch.compile.

The compiler must know the shape of the result in advance, so every rank must have the same number of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringspan.errors import InputError
from ringspan.torch_private.process_groups import resolve_process_group
from ringspan.transports import ProcessGroupTransport

# ``pg_name`` is a process group's name, since an operator cannot take the group itself: mesh.get_group().group_name.

LABEL = "flex_cp_allgather"


@torch.library.custom_op("ringspan::flex_cp_allgather", mutates_args=())
def flex_cp_allgather(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all ranks, concatenated along ``seq_dim`` in rank order."""
    group = ProcessGroupTransport(resolve_process_group(pg_name))  # type: ignore[arg-type]
    counts = [k.shape[seq_dim], v.shape[seq_dim]]
    counts_of_ranks = group.all_gather_ints(counts, k.device, label=LABEL)
    if any(other != counts for other in counts_of_ranks):
        raise InputError(
            f"the ranks have {counts_of_ranks} keys and values, but only equal shards can be gathered: "
            "pad them, or use rs.ContextParallel, which takes shards of any size"
        )
    return _all_gather_dim(k, seq_dim, group), _all_gather_dim(v, seq_dim, group)


@torch.library.custom_op("ringspan::flex_cp_allgather_backward", mutates_args=())
def flex_cp_allgather_backward(grad_full_k: Tensor, grad_full_v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    """Sum the gradients of all ranks, and return this rank's part: every rank has used every key."""
    group = ProcessGroupTransport(resolve_process_group(pg_name))  # type: ignore[arg-type]
    return _reduce_scatter_dim(grad_full_k, seq_dim, group), _reduce_scatter_dim(grad_full_v, seq_dim, group)


@flex_cp_allgather.register_fake
def _(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    world = resolve_process_group(pg_name).size()  # type: ignore[arg-type]
    return _empty(k, seq_dim, k.shape[seq_dim] * world), _empty(v, seq_dim, v.shape[seq_dim] * world)


@flex_cp_allgather_backward.register_fake
def _(grad_full_k: Tensor, grad_full_v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    world = resolve_process_group(pg_name).size()  # type: ignore[arg-type]
    k_tokens, v_tokens = grad_full_k.shape[seq_dim] // world, grad_full_v.shape[seq_dim] // world
    return _empty(grad_full_k, seq_dim, k_tokens), _empty(grad_full_v, seq_dim, v_tokens)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.seq_dim, ctx.pg_name = inputs


def _backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Any, ...]:
    return *flex_cp_allgather_backward(grad_k, grad_v, ctx.seq_dim, ctx.pg_name), None, None


flex_cp_allgather.register_autograd(_backward, setup_context=_setup)


def _all_gather_dim(x: Tensor, dim: int, group: ProcessGroupTransport) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    return torch.cat(group.all_gather_rows(rows, [len(rows)] * group.world, label=LABEL)).movedim(0, dim).contiguous()


def _reduce_scatter_dim(grad: Tensor, dim: int, group: ProcessGroupTransport) -> Tensor:
    total = group.all_reduce_sum(grad)
    return total.chunk(group.world, dim)[group.rank].contiguous()


def _empty(x: Tensor, dim: int, tokens: int | torch.SymInt) -> Tensor:
    shape: list[Any] = list(x.shape)
    shape[dim] = tokens
    return x.new_empty(shape)
