"""Front ends: the ways in which users reach the engine."""

from ringspan.frontends.activate import activate, available, current, restore
from ringspan.frontends.attention import attention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.flex import flex_attention
from ringspan.frontends.labels import shift_labels
from ringspan.frontends.local_world import LocalWorld
from ringspan.frontends.sdpa import local_attention

__all__ = [
    "ContextParallel",
    "LocalWorld",
    "activate",
    "attention",
    "available",
    "current",
    "flex_attention",
    "local_attention",
    "restore",
    "shift_labels",
]
