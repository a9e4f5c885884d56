"""Costs: how long plans take on a machine, without running them."""

from ringspan.costs.cost import Cost, cost, tiled_area
from ringspan.costs.hardware import HARDWARE, Hardware, Link, Speed
from ringspan.costs.hardware import hardware as named_hardware

__all__ = ["HARDWARE", "Cost", "Hardware", "Link", "Speed", "cost", "named_hardware", "tiled_area"]
