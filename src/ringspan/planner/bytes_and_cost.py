"""Bytes and cost of plans. A plan is first fitted to the number of heads of the tensors."""

from __future__ import annotations

from collections.abc import Sequence

from ringspan.costs import plan_cost
from ringspan.costs.hardware import Hardware
from ringspan.planner.plan_class import Plan
from ringspan.plans import memory
from ringspan.plans import shape as shapes
from ringspan.plans.data import Phase
from ringspan.plans.shape import Shape


def bytes_moved(plan: Plan, shape: Shape, phase: Phase) -> tuple[int, int]:
    """Return the bytes that this rank sends and receives in a phase."""
    return shapes.bytes_moved(plan.for_heads(shape.heads, shape.kv_heads), shape, phase)


def peak_bytes(plan: Plan, shape: Shape, phase: Phase) -> int:
    """Return the peak of the buffers of a phase, over all steps."""
    return memory.peak_bytes(plan.for_heads(shape.heads, shape.kv_heads), shape, phase)


def memory_bytes(plan: Plan, shape: Shape, phase: Phase) -> int:
    """Return the peak memory of a phase, over all steps: buffers, allocations of the kernel, partial results. Inputs
    and results are not counted."""
    return memory.memory_bytes(plan.for_heads(shape.heads, shape.kv_heads), shape, phase)


def cost(plans: Sequence[Plan], machine: Hardware, shape: Shape) -> plan_cost.Cost:
    """Return the cost of the plans of all ranks, or of a sample of ranks, in rank order."""
    return plan_cost.cost([plan.for_heads(shape.heads, shape.kv_heads) for plan in plans], machine, shape)
