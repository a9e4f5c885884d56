"""Attention over a process group, without a context.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.engine import Call, Look, Seat, is_watched, look_of, shape_of, take_seat
from ringspan.errors import InputError
from ringspan.frontends.dtensors import is_dtensor
from ringspan.frontends.score_mods import check_heads
from ringspan.frontends.validate import given_scale
from ringspan.kernels import Inputs, MaskMod, Partial, ScoreMod, check_backend, mods_of, select_kernel
from ringspan.masks import Mask
from ringspan.planner import Plan
from ringspan.transports import (
    ProcessGroupTransport,
    RankSignature,
    as_transport,
    check_agreement,
    digest_as_int64,
    report_invalid_inputs,
)
from ringspan.transports.handshake import DTYPES, NO_SCORE_MOD, VERSION
from ringspan.user_functions.digests import function_digest

if TYPE_CHECKING:
    from ringspan.frontends.corners import Parts

Group = ProcessGroupTransport | dist.ProcessGroup | DeviceMesh | None


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
    backend: str = "auto",
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
    backend: str = "auto",
) -> Partial: ...
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
    backend: str = "auto",
) -> Tensor | Partial:
    """Exact attention of a sequence that is split over the ranks of a group.

    ``q`` (B, H, S, D), ``k`` (B, G, T, D) and ``v`` (B, G, T, E) are this rank's tokens, in the order of
    ``plan.q_layout`` and ``plan.kv_layout``; H is a multiple of G. The result (B, H, S, E) is that of this rank's
    queries over all keys of all ranks, in the dtype of ``q``, differentiable in q, k and v. ``return_lse=True`` gives
    ``(out, lse)``, both differentiable.

    ``score_mod(score, b, h, q, k)`` gives each visible pair another score, as FlexAttention does; its indices are global.

    ``backend`` names the kernel: fa4, cudnn, flash, efficient, flex, flex_flash, cpu, eager or reference; ``"auto"`` is the
    first of them that can serve and is not there for special wishes.

    ``group`` is a process group (None: the default one) or a one-axis DeviceMesh; every rank of it must make the call.
    DTensors give DTensors; ``frontends/shards.py`` says how they must be placed.
    """
    parts = None
    if is_dtensor(q) and (score_mod is not None or plan.mask.predicate is not None):
        from ringspan.frontends.corners import parts_of, score_mod_at

        parts = parts_of(q)
        score_mod = None if score_mod is None else score_mod_at(parts, score_mod)
    if is_watched() and score_mod is None:
        place = traced_seat(plan, group, backend, parts)
    else:  # nobody looks for it, or nobody could find it: a function has no name that other processes know
        place = unnumbered(_at(parts, plan), as_transport(group), backend, score_mod)
    result = attention_at(place, q, k, v, scale)
    return result if return_lse else result.out


def attention_at(place: Seat, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Partial:
    """Attention of the rank that has this seat, of tensors or of the shards of DTensors."""
    factor = given_scale(scale, q.shape[-1])
    if not (is_dtensor(q) or is_dtensor(k) or is_dtensor(v)):
        return place.attend(q, k, v, factor)
    from ringspan.frontends.shards import on_shards

    return on_shards(lambda q, k, v: place.attend(q, k, v, factor), q, k, v, place.processes)


def traced_seat(plan: Plan, group: Group, backend: str, parts: Parts | None) -> Seat:
    """Its seat, for whoever looks at operators. Compilers take it as they find it, and do not look into plans."""
    id(plan)  # a compiled program that asks for this is of this plan alone; what it takes as it finds it is not checked again
    return plan.given_to(seat, group, backend, parts)


def seat(plan: Plan, group: Group, backend: str, parts: Parts | None = None) -> Seat:
    """Where the operator finds the plan; with ``parts``, that of a shard of batch and heads."""
    plan, ranks = _at(parts, plan), as_transport(group)
    name = f"{plan.digest} rank {plan.rank} of {ranks.group.group_name} {ranks.ranks} by {backend}"
    return take_seat(name, unnumbered(plan, ranks, backend))


def _at(parts: Parts | None, plan: Plan) -> Plan:
    if parts is None:
        return plan
    from ringspan.frontends.corners import plan_at

    return plan_at(parts, plan)


def unnumbered(plan: Plan, ranks: ProcessGroupTransport, backend: str, score_mod: ScoreMod | None = None) -> Seat:
    """A seat without a ticket."""
    check_backend(backend)
    prepare = partial(prepared, plan, ranks, backend, score_mod=score_mod)
    return Seat(prepare=prepare, run=ranks.run, processes=tuple(ranks.ranks))


def prepared(
    plan: Plan,
    ranks: ProcessGroupTransport,
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> tuple[Plan, Call]:
    """The plan for these tensors' heads and the call's kernel, once all ranks have come with the same."""
    if (plan.world, plan.rank) != (ranks.world, ranks.rank):
        raise InputError(
            f"this is the plan of rank {plan.rank} of {plan.world}, but this process is rank {ranks.rank} of {ranks.world} "
            "in the group: "
            "make it with rs.plan(mask, world=..., rank=...) for this group"
        )
    try:
        fitted, hello, inputs = plan.derived(introduced, look_of(q), look_of(k), look_of(v))
    except InputError:
        report_invalid_inputs(ranks, q.device)
        raise
    plan = fitted or plan
    if score_mod is not None:
        hello = hello._replace(score_mod=digest_as_int64(function_digest(score_mod)))
    check_agreement(ranks, hello, zip(plan.q_layout.counts, plan.kv_layout.counts, strict=True), q.device)
    return plan, _call(plan, q, inputs, scale, backend, score_mod)


def introduced(plan: Plan, q: Look, k: Look, v: Look) -> tuple[Plan | None, RankSignature, Inputs]:
    """The plan for the heads of these tensors, if that is another, what this rank says of itself to the others, and what a
    kernel is asked."""
    shape = shape_of(q, k, v)
    fitted = plan.for_heads(shape.heads, shape.kv_heads)
    hello = RankSignature(
        version=VERSION,
        digest=digest_as_int64(fitted.digest),
        batch=shape.batch,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_dim=v.shape[-1],
        dtype=DTYPES.index(shape.dtype),
        score_mod=NO_SCORE_MOD,
        queries=q.shape[2],
        keys=k.shape[2],
    )
    # A plan that kept itself would outlive whoever has it.
    return None if fitted is plan else fitted, hello, _inputs(fitted, q, v)


def call_for(plan: Plan, q: Tensor, v: Tensor, scale: float, backend: str, score_mod: ScoreMod | None = None) -> Call:
    """The kernel, scale and functions of a call."""
    return _call(plan, q, _inputs(plan, q, v), scale, backend, score_mod)


def _inputs(plan: Plan, q: Tensor | Look, v: Tensor | Look) -> Inputs:
    return Inputs(device=q.device, dtype=q.dtype, head_dim=q.shape[-1], v_dim=v.shape[-1], windows_or_documents=plan.is_ragged)


def _call(plan: Plan, q: Tensor, inputs: Inputs, scale: float, backend: str, score_mod: ScoreMod | None) -> Call:
    check_heads(score_mod, q.shape[1])
    mods = mods_of(score_mod, _settling(plan.mask, q), q)
    if mods is not None:
        inputs = replace(inputs, has_mods=True)
    return Call(kernel=select_kernel(backend, inputs), scale=scale, head_dim=inputs.head_dim, mods=mods)


def _settling(mask: Mask, q_BHSD: Tensor) -> MaskMod | None:
    """The function that settles the mask, once it surely is about these tensors."""
    predicate = mask.predicate
    if predicate is None:
        return None
    check_members(mask, q_BHSD.shape[0], q_BHSD.shape[1])
    if predicate.is_stale:
        raise InputError(
            f"a tensor that the function of {mask.name} uses was changed in place after the mask was made, so that what was "
            "planned may not be what it says now: make the mask again"
        )
    for x, _ in predicate.captured:
        if x.device != q_BHSD.device and x.ndim:
            raise InputError(f"the function of {mask.name} uses a tensor on {x.device}, but q is on {q_BHSD.device}: move it")
    return predicate.mask_mod


def check_members(mask: Mask, batch: int, heads: int) -> None:
    """Whether a mask that tells members of the batch or heads apart is about as many as there are."""
    if mask.predicate is None:
        return
    for what, planned, given in (("batch", mask.predicate.batch, batch), ("heads", mask.predicate.heads, heads)):
        if planned not in (None, given):
            raise InputError(f"the mask {mask.name} is for {what}={planned}, but q has {given}: make it for these tensors")
