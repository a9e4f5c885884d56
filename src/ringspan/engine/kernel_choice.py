"""Choose the kernel of a call, and collect the user's functions that it is called with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ringspan.engine.executor import AttentionConfig
from ringspan.errors import InputError
from ringspan.kernels import Inputs, Kernel, MaskMod, ScoreMod, mods_of, select_kernel
from ringspan.masks import Mask
from ringspan.planner import Plan
from ringspan.transports import CallDescription
from ringspan.user_functions.digests import function_digest
from ringspan.user_functions.values import values_digest


def config_for(
    plan: Plan,
    q_BHSD: Tensor,
    v_BGTE: Tensor,
    scale: float,
    backend: str,
    score_mod: ScoreMod | None = None,
    *,
    cuda_graphs: bool = False,
) -> AttentionConfig:
    """Return the kernel, scale and functions for these tensors."""
    inputs = kernel_inputs(plan, q_BHSD, v_BGTE)
    return choose_config(plan, q_BHSD, v_BGTE.shape[1], inputs, scale, backend, score_mod, cuda_graphs=cuda_graphs)


def kernel_inputs(plan: Plan, q_BHSD: Tensor, v_BGTE: Tensor) -> Inputs:
    """Return the properties of a call that decide which kernels support it."""
    return Inputs(
        device=q_BHSD.device,
        dtype=q_BHSD.dtype,
        head_dim=q_BHSD.shape[-1],
        v_dim=v_BGTE.shape[-1],
        windows_or_documents=plan.is_ragged,
    )


def choose_config(
    plan: Plan,
    q_BHSD: Tensor,
    kv_heads: int,
    inputs: Inputs,
    scale: float,
    backend: str,
    score_mod: ScoreMod | None,
    mods_kernel: Kernel | None = None,
    *,
    cuda_graphs: bool = False,
) -> AttentionConfig:
    """Do the same as :func:`config_for`, given the number of key heads, the kernel inputs and, if known, the kernel for
    calls with functions."""
    check_score_mod_heads(score_mod, q_BHSD.shape[1])
    if inputs.dtype == torch.float64 and plan.program.rounds_dkv:
        raise InputError(
            f"dkv_dtype={plan.program.dkv_dtype!r} would round gradients of float64 tensors to 8 bits, and large ones to "
            "infinity: leave out dkv_dtype, or use tensors of lower precision"
        )
    mods = mods_of(score_mod, _mask_mod(plan.mask, q_BHSD), q_BHSD)
    if mods is None:
        kernel = select_kernel(backend, inputs)
    else:
        kernel = mods_kernel or select_kernel(backend, replace(inputs, has_mods=True))
    shape = (q_BHSD.shape[0], q_BHSD.shape[1], kv_heads, inputs.head_dim, inputs.v_dim)
    dtype = str(inputs.dtype).removeprefix("torch.")
    digest = "" if score_mod is None else function_digest(score_mod)
    call = CallDescription("forward", plan.digest, scale, dtype, shape, score_mod=digest)
    return AttentionConfig(
        kernel=kernel,
        scale=scale,
        head_dim=inputs.head_dim,
        mods=mods,
        forward_call=call,
        backward_call=call._replace(kind="backward"),
        cuda_graphs=cuda_graphs,
    )


def with_values(config: AttentionConfig) -> AttentionConfig:
    """Add the values that the functions of a call use to what the ranks compare."""
    mods, call = config.mods, config.forward_call
    assert mods is not None
    assert call is not None
    functions = [f for f in (mods.score_mod, mods.mask_mod) if f is not None]
    call = call._replace(values=values_digest(functions, mods.captured))
    return replace(config, forward_call=call, backward_call=call._replace(kind="backward"))


def with_max_logits(config: AttentionConfig) -> AttentionConfig:
    """Ask for the largest logits as well. All ranks must, so it is part of what they compare."""
    call = config.forward_call
    assert call is not None
    return replace(config, max_logits=True, forward_call=call._replace(kind="forward with max logits"))


def _mask_mod(mask: Mask, q_BHSD: Tensor) -> MaskMod | None:
    """Return the function that decides the undecided pairs of the mask, if it has one.

    Raise if it does not fit the tensors.
    """
    predicate = mask.predicate
    if predicate is None:
        return None
    check_mask_sizes(mask, q_BHSD.shape[0], q_BHSD.shape[1])
    if predicate.is_stale:
        raise InputError(
            f"a tensor that the function of {mask.name} uses was changed in place after the mask was made, so the plan may no "
            "longer be that of the function: make the mask again"
        )
    for x, _ in predicate.captured:
        if x.device != q_BHSD.device and x.ndim:
            raise InputError(f"the function of {mask.name} uses a tensor on {x.device}, but q is on {q_BHSD.device}: move it")
    return predicate.mask_mod


def check_mask_sizes(mask: Mask, batch: int, heads: int) -> None:
    """Raise if the mask depends on batch index or head, and was made for another batch size or number of heads."""
    if mask.predicate is None:
        return
    for what, planned, given in (("batch", mask.predicate.batch, batch), ("heads", mask.predicate.heads, heads)):
        if planned not in (None, given):
            raise InputError(f"the mask {mask.name} is for {what}={planned}, but q has {given}: make it for these tensors")


def check_score_mod_heads(score_mod: ScoreMod | None, heads: int) -> None:
    """Raise if one of the ready-made score_mods was made for another number of heads.

    Other functions are not checked.
    """
    made_for = getattr(score_mod, "ringspan_heads", None)
    if made_for not in (None, heads):
        raise InputError(
            f"this score_mod was made for {made_for} heads, but q has {heads}: make it of a tensor that has one row for each "
            "query head"
        )
