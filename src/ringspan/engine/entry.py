"""The way into the engine: attention of one rank under a plan handle.

::

    eager code                 attend ──► _Attend, an autograd function ──┐
                                                                          ├──► forward_pass, backward_pass ──► executor
    traced, or a dispatch mode attend ──► ringspan::attend, an operator ──┘

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from torch import Tensor

from ringspan.engine.autograd import differentiable
from ringspan.engine.handles import PlanHandle
from ringspan.engine.operator import attend_by_id, is_exporting, is_traced
from ringspan.kernels import Partial, ScoreMod
from ringspan.torch_private.function_modes import disable_torch_function


def attend(
    handle: PlanHandle,
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> Partial:
    """Attention of this rank's tensors: out (B, H, S, E) and lse (B, H, S), differentiable.

    A score_mod never becomes part of an operator: a function has no name that other processes know.
    """
    plan_id = handle.id
    if plan_id is not None and score_mod is None and is_traced():
        if is_exporting():
            plan_id = handle.constant_id()
        return attend_by_id(q_BHSD, k_BGTD, v_BGTE, plan_id, scale)
    with disable_torch_function():  # a `with cp:` block around this call must not catch the kernels' own calls
        plan, config = handle.prepare(q_BHSD, k_BGTD, v_BGTE, scale, score_mod)
        out_SBHE, lse_SBH = differentiable((plan,), config, handle.group.run, (q_BHSD, k_BGTD, v_BGTE))
        return Partial(out_SBHE.movedim(0, 2), lse_SBH.movedim(0, 2))
