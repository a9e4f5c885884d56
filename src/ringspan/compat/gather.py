"""All ranks' keys and values on every rank, as an operator that autograd and the compiler know.

The shape of the result must be known before it is computed, so every rank must have equally many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringspan.errors import InputError
from ringspan.torch_private.process_groups import resolve_process_group
from ringspan.transports import ProcessGroupTransport

# The group by its name: operators take no other kind of handle. c10d._get_process_group_name(mesh.get_group()) gives it.


@torch.library.custom_op("ringspan::flex_cp_allgather", mutates_args=())
def flex_cp_allgather(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    """The keys and values of all ranks, rank after rank along ``seq_dim``."""
    group = ProcessGroupTransport(resolve_process_group(pg_name))  # type: ignore[arg-type]
    mine = [k.shape[seq_dim], v.shape[seq_dim]]
    everyone = group.gather_numbers(mine, k.device)
    if any(theirs != mine for theirs in everyone):
        raise InputError(
            f"the ranks came with {everyone} keys and values: only equal shares can be gathered here. "
            "Pad them, or use rs.ContextParallel, which takes any"
        )
    return _gathered(k, seq_dim, group), _gathered(v, seq_dim, group)


@torch.library.custom_op("ringspan::flex_cp_allgather_backward", mutates_args=())
def flex_cp_allgather_backward(grad_k: Tensor, grad_v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    """Each rank's share of the sum over ranks: every rank has used every key."""
    group = ProcessGroupTransport(resolve_process_group(pg_name))  # type: ignore[arg-type]
    return _summed_share(grad_k, seq_dim, group), _summed_share(grad_v, seq_dim, group)


@flex_cp_allgather.register_fake
def _(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    world = resolve_process_group(pg_name).size()  # type: ignore[arg-type]
    return _empty(k, seq_dim, k.shape[seq_dim] * world), _empty(v, seq_dim, v.shape[seq_dim] * world)


@flex_cp_allgather_backward.register_fake
def _(grad_k: Tensor, grad_v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    world = resolve_process_group(pg_name).size()  # type: ignore[arg-type]
    return _empty(grad_k, seq_dim, grad_k.shape[seq_dim] // world), _empty(grad_v, seq_dim, grad_v.shape[seq_dim] // world)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.seq_dim, ctx.pg_name = inputs


def _backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Any, ...]:
    return *flex_cp_allgather_backward(grad_k, grad_v, ctx.seq_dim, ctx.pg_name), None, None


flex_cp_allgather.register_autograd(_backward, setup_context=_setup)


def _gathered(x: Tensor, dim: int, group: ProcessGroupTransport) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    return torch.cat(group.all_gather_rows(rows, [len(rows)] * group.world)).movedim(0, dim).contiguous()


def _summed_share(grad: Tensor, dim: int, group: ProcessGroupTransport) -> Tensor:
    total = group.all_reduce_sum(grad)
    return total.chunk(group.world, dim)[group.rank].contiguous()


def _empty(x: Tensor, dim: int, tokens: int | torch.SymInt) -> Tensor:
    shape: list[Any] = list(x.shape)
    shape[dim] = tokens
    return x.new_empty(shape)
