"""Costs: how long plans take on a machine, without running them."""

from ringspan.costs.hardware import HARDWARE, Hardware, Link, Speed
from ringspan.costs.hardware import hardware as named_hardware
from ringspan.costs.plan_cost import Cost, cost, tiled_area

__all__ = ["HARDWARE", "Cost", "Hardware", "Link", "Speed", "cost", "named_hardware", "tiled_area"]
