"""Planning: the plan of one rank for a mask, and the automatic choice of layout and strategy."""

from ringspan.planner.best_on import best_on
from ringspan.planner.bytes_and_cost import bytes_moved, cost, memory_bytes, peak_bytes
from ringspan.planner.choose import Candidate, Choice
from ringspan.planner.microbatches import Microbatch, pack
from ringspan.planner.plan_class import Plan, plan_rank
from ringspan.planner.plan_function import plan
from ringspan.strategies.registry import register_strategy

__all__ = [
    "Candidate",
    "Choice",
    "Microbatch",
    "Plan",
    "best_on",
    "bytes_moved",
    "cost",
    "memory_bytes",
    "pack",
    "peak_bytes",
    "plan",
    "plan_rank",
    "register_strategy",
]
