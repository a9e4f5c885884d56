"""Plans: data that says what a rank sends, receives and computes."""

from ringspan.plans.data import Plan, Program, Slot, Step, Task, Transfer
from ringspan.plans.memory import memory_bytes, peak_bytes
from ringspan.plans.problem import Scene, needed_rows
from ringspan.plans.shape import Shape, bytes_moved, check_shape
from ringspan.plans.verify import verify

__all__ = [
    "Plan",
    "Program",
    "Scene",
    "Shape",
    "Slot",
    "Step",
    "Task",
    "Transfer",
    "bytes_moved",
    "check_shape",
    "memory_bytes",
    "needed_rows",
    "peak_bytes",
    "verify",
]
