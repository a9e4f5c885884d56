"""The entry point of the engine: attention of one rank under a plan handle.

::

    eager code                     attend ──► Attend, an autograd function ───┐
                                                                              ├──► executor: forward, backward
    traced, or in a dispatch mode  attend ──► ringspan::attend, an operator ──┘

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from ringspan.engine.autograd import Attend, positive_scale, refuse_transforms
from ringspan.engine.flop_formulas import count_attention_in_flop_counters
from ringspan.engine.handles import PlanHandle
from ringspan.engine.kernel_choice import with_max_logits
from ringspan.engine.operator import attend_by_id, attend_by_id_with_max_logits, is_exporting
from ringspan.kernels import Partial, ScoreMod
from ringspan.torch_private.dispatch_modes import dispatch_mode_depth, dispatch_mode_stack
from ringspan.torch_private.function_modes import disable_torch_function
from ringspan.transports import CallPair


@overload
def attend(
    handle: PlanHandle,
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    *,
    max_logits: Literal[False] = False,
) -> Partial: ...
@overload
def attend(
    handle: PlanHandle,
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    *,
    max_logits: Literal[True],
) -> tuple[Partial, Tensor]: ...
def attend(
    handle: PlanHandle,
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    *,
    max_logits: bool = False,
) -> Partial | tuple[Partial, Tensor]:
    """Return out (B, H, S, E) and lse (B, H, S) of this rank's tensors, differentiable.

    With ``max_logits`` also return the largest logit of each head over all ranks: (H,), not differentiable.
    ``scale=None`` is 1 / √(head dim). A call with a score_mod is never an operator, because operators take no
    functions.
    """
    if scale is None:
        scale = max(1, q_BHSD.shape[-1]) ** -0.5  # a head dim of 0 raises below
    if score_mod is None and is_traced():
        # Only one of them is read: torch.export of torch 2.11 makes every tensor that is read an input of the program.
        plan_id = handle.constant_id() if is_exporting() else handle.id
        if plan_id is not None:
            if max_logits:
                return attend_by_id_with_max_logits(q_BHSD, k_BGTD, v_BGTE, plan_id, scale)
            return attend_by_id(q_BHSD, k_BGTD, v_BGTE, plan_id, scale)
    try:
        with disable_torch_function():  # a `with cp:` context around this call must not intercept the kernels' own calls
            plan, config = handle.prepare(q_BHSD, k_BGTD, v_BGTE, scale, score_mod)
            if max_logits:
                config = with_max_logits(config)
            if scale <= 0:
                positive, sign = positive_scale(scale)
                q_BHSD, config = q_BHSD * sign, replace(config, scale=positive)
            learned = () if config.mods is None else config.mods.learned
            run = partial(handle.group.run, device=q_BHSD.device, pair=CallPair())
            found = Attend.apply((plan,), config, run, torch.is_grad_enabled(), q_BHSD, k_BGTD, v_BGTE, *learned)
            result = Partial(found[0].movedim(0, 2), found[1].movedim(0, 2))
            return (result, found[2]) if max_logits else result
    except Exception as error:  # out of memory, most likely, before or after the exchanges of the call
        handle.refuse("forward", error, scale)
        refuse_transforms(error)
        raise


def is_traced() -> bool:
    """Return whether the call must be a custom operator: while torch.compile traces it, or under a dispatch mode.

    Plain eager code skips the operator, which would only cost time. So does torch's CommDebugMode: it counts messages,
    and would find none inside an operator.
    """
    if torch.compiler.is_dynamo_compiling():  # is_compiling() is True while any thread of the process compiles
        return True
    if dispatch_mode_depth() == 0:
        return False
    count_attention_in_flop_counters()
    return any(type(mode).__name__ != "CommDebugMode" for mode in dispatch_mode_stack())
