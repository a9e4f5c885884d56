"""The FLOPs of attention for PyTorch's ``FlopCounterMode``: those of the visible pairs that this rank computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringspan.costs.plan_cost import flops_per_pair
from ringspan.engine.handles import registry
from ringspan.plans import Shape
from ringspan.plans.data import Phase
from ringspan.torch_private.dispatch_modes import add_flop_formulas, without_dispatch_modes


def count_attention_in_flop_counters() -> None:
    """Add the formulas of ringspan's operators to each FlopCounterMode of this thread."""
    attend, backward = torch.ops.ringspan.attend, torch.ops.ringspan.attend_backward
    add_flop_formulas({attend: _forward, torch.ops.ringspan.attend_with_max_logits: _forward, backward: _backward})


def _forward(q: Tensor, k: Tensor, v: Tensor, plan_id: Tensor, scale: float, **_: Any) -> int:
    return _flops("forward", q, k, v, plan_id)


def _backward(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, plan_id: Tensor, *_: Any, **__: Any
) -> int:
    return _flops("backward", q, k, v, plan_id)


def _flops(phase: Phase, q: Tensor, k: Tensor, v: Tensor, plan_id: Tensor) -> int:
    shape = Shape(batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[-1], v_dim=v.shape[-1])
    with without_dispatch_modes():  # FakeTensorMode does not read the number in a tensor
        plan = registry.find(plan_id).plan.for_heads(shape.heads, shape.kv_heads)
    pairs = 0
    for step in plan.program.steps(phase):
        for task in step.tasks:
            heads = plan.program.q_slots[task.q_slot].heads
            pairs += task.area * (shape.heads if heads is None else heads)
    return pairs * flops_per_pair(shape, phase)
