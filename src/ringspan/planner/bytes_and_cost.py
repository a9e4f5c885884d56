"""Bytes and seconds of plans, for tensors with any number of heads: the plan is fitted to them first."""

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
    """How many bytes this rank sends and how many it receives in a phase."""
    return shapes.bytes_moved(plan.for_heads(shape.heads, shape.kv_heads), shape, phase)


def peak_bytes(plan: Plan, shape: Shape, phase: Phase) -> int:
    """The most memory that a phase holds in buffers of its own, in any step."""
    return memory.peak_bytes(plan.for_heads(shape.heads, shape.kv_heads), shape, phase)


def memory_bytes(plan: Plan, shape: Shape, phase: Phase) -> int:
    """The most memory that a phase holds in any step, beside its inputs and results: buffers, kernel, partial
    results."""
    return memory.memory_bytes(plan.for_heads(shape.heads, shape.kv_heads), shape, phase)


def cost(plans: Sequence[Plan], machine: Hardware, shape: Shape) -> plan_cost.Cost:
    """What the plans of all ranks cost together, or of a sample of ranks, in order."""
    return plan_cost.cost([plan.for_heads(shape.heads, shape.kv_heads) for plan in plans], machine, shape)
