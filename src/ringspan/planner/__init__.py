"""Planning: the plan of one rank for a mask, and the automatic choice of layout and strategy."""

from ringspan.planner.choose import Candidate, Choice
from ringspan.planner.compare import best_on
from ringspan.planner.figures import bytes_moved, cost, memory_bytes, peak_bytes
from ringspan.planner.make_plan import plan
from ringspan.planner.old_names import forget
from ringspan.planner.user_plan import Plan, plan_rank
from ringspan.strategies.registry import register_strategy

__all__ = [
    "Candidate",
    "Choice",
    "Plan",
    "best_on",
    "bytes_moved",
    "cost",
    "forget",
    "memory_bytes",
    "peak_bytes",
    "plan",
    "plan_rank",
    "register_strategy",
]
