"""Attention over a process group, without a context.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from ringspan.engine import PlanHandle, attend, is_traced, registry
from ringspan.errors import InputError
from ringspan.frontends.dtensor import any_dtensor, is_dtensor
from ringspan.frontends.groups import Group
from ringspan.frontends.reporting import report_error
from ringspan.frontends.validate import check_scale
from ringspan.kernels import Partial, ScoreMod
from ringspan.planner import Plan
from ringspan.transports import as_transport

if TYPE_CHECKING:
    from ringspan.frontends.dtensor.offsets import ShardExtents


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    group: Group = None,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    backend: str = "auto",
    cuda_graphs: bool = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    group: Group = None,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    backend: str = "auto",
    cuda_graphs: bool = False,
) -> Partial: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    group: Group = None,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[True],
    backend: str = "auto",
    cuda_graphs: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    group: Group = None,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: Literal[True],
    return_max_logits: Literal[True],
    backend: str = "auto",
    cuda_graphs: bool = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    group: Group = None,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str = "auto",
    cuda_graphs: bool = False,
) -> Tensor | Partial | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Compute exact attention of a sequence that is split over the ranks of a group.

    ``q`` (B, H, S, D), ``k`` (B, G, T, D) and ``v`` (B, G, T, E) are this rank's tokens, in the order of
    ``plan.q_layout`` and ``plan.kv_layout``; H is a multiple of G. The result (B, H, S, E) is that of this rank's
    queries over all keys of all ranks, in the dtype of ``q``, differentiable in q, k and v. ``return_lse=True`` gives
    ``(out, lse)``, both differentiable.

    ``return_max_logits=True`` adds the largest logit of each query head to the result: ``(out, max_logits)`` or
    ``(out, lse, max_logits)``. A logit is the score of a visible pair after ``scale`` and ``score_mod``, before the
    softmax. ``max_logits`` (H,) is the maximum over the batch and all queries and keys of all ranks, the same on every
    rank, in the dtype of lse, without gradient; -inf for a head that sees nothing. It needs the products of queries
    and keys once more; out, lse and gradients are the same bits with and without it.

    ``score_mod(score, b, h, q, k)`` changes the score of each visible pair, as in FlexAttention. Its indices are
    global.

    ``backend`` names the kernel: fa4, cudnn, flash, efficient, flex, flex_flash, cpu, eager or reference; ``"auto"``
    takes the first available one in this order. flex_flash and reference are used only when named.

    ``cuda_graphs=True`` captures passes that are called again and again in CUDA graphs; see
    :class:`ringspan.ContextParallel`.

    ``group`` is a process group (None: the default one) or a one-axis DeviceMesh; every rank of it must make the call.
    DTensors give DTensors; ``frontends/dtensor/attention.py`` says which placements are allowed.
    """
    try:
        extents = None
        if is_dtensor(q) and (score_mod is not None or plan.mask.predicate is not None):
            from ringspan.frontends.dtensor.offsets import extents_of, shard_score_mod

            extents = extents_of(q)
            score_mod = None if score_mod is None else shard_score_mod(extents, score_mod)
        if is_traced() and score_mod is None:
            handle = _traced_handle(plan, group, backend, extents, cuda_graphs)
        else:
            plan, ranks = _shard_plan(extents, plan), as_transport(group)
            handle = PlanHandle(plan=plan, group=ranks, backend=backend, cuda_graphs=cuda_graphs)
    except Exception as error:
        report_error(group, "forward", error)
        raise
    if return_max_logits:
        result, max_logits_H = _attend_with_max_logits(handle, q, k, v, scale, score_mod)
        return (*result, max_logits_H) if return_lse else (result.out, max_logits_H)
    result = attend_tensors(handle, q, k, v, scale, score_mod)
    return result if return_lse else result.out


def attend_tensors(
    handle: PlanHandle, q: Tensor, k: Tensor, v: Tensor, scale: float | None, score_mod: ScoreMod | None = None
) -> Partial:
    """Compute attention under a plan handle, of plain tensors or of the shards of DTensors."""
    try:
        factor = None if scale is None else check_scale(scale, q.shape[-1])
        if not any_dtensor(q, k, v):
            return attend(handle, q, k, v, factor, score_mod)
        from ringspan.frontends.dtensor.attention import attend_shards

        def attend_local(q: Tensor, k: Tensor, v: Tensor) -> Partial:
            return attend(handle, q, k, v, factor, score_mod)

        return attend_shards(attend_local, q, k, v, tuple(handle.group.global_ranks))
    except Exception as error:
        report_error(handle.group, "forward", error, plan=handle.plan.digest)
        raise


def _attend_with_max_logits(
    handle: PlanHandle, q: Tensor, k: Tensor, v: Tensor, scale: float | None, score_mod: ScoreMod | None
) -> tuple[Partial, Tensor]:
    try:
        if any_dtensor(q, k, v):
            raise InputError(
                "return_max_logits=True takes plain tensors: call it with q.to_local(), k.to_local() and v.to_local(). The "
                "result is then that of the local heads and batch rows"
            )
        return attend(handle, q, k, v, check_scale(scale, q.shape[-1]), score_mod, max_logits=True)
    except Exception as error:
        report_error(handle.group, "forward", error, plan=handle.plan.digest)
        raise


def _traced_handle(plan: Plan, group: Group, backend: str, extents: ShardExtents | None, cuda_graphs: bool) -> PlanHandle:
    """Return a registered handle, as a constant of the compiled program: torch.compile does not trace into plans."""
    id(plan)  # makes Dynamo guard on this plan; it does not guard on the ``self`` of a method with a constant result
    return plan.call_as_constant(registered_handle, group, backend, extents, cuda_graphs)


def registered_handle(
    plan: Plan, group: Group, backend: str, extents: ShardExtents | None = None, cuda_graphs: bool = False
) -> PlanHandle:
    """Return a handle that custom operators can find; with ``extents``, that of a shard of batch and heads."""
    plan, ranks = _shard_plan(extents, plan), as_transport(group)
    name = f"{plan.digest} rank {plan.rank} of {ranks.group.group_name} {ranks.global_ranks} by {backend}"
    if cuda_graphs:
        name += " in CUDA graphs"
    return registry.register(name, PlanHandle(plan=plan, group=ranks, backend=backend, cuda_graphs=cuda_graphs))


def _shard_plan(extents: ShardExtents | None, plan: Plan) -> Plan:
    if extents is None:
        return plan
    from ringspan.frontends.dtensor.offsets import shard_plan

    return shard_plan(extents, plan)
