"""Plans: data that says what a rank sends, receives and computes."""

from ringspan.plans.data import Program, RankPlan, Slot, Step, Task, Transfer
from ringspan.plans.problem import Problem, needed_rows
from ringspan.plans.shape import Shape, check_shape
from ringspan.plans.verify import verify

__all__ = [
    "Problem",
    "Program",
    "RankPlan",
    "Shape",
    "Slot",
    "Step",
    "Task",
    "Transfer",
    "check_shape",
    "needed_rows",
    "verify",
]
