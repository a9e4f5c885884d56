"""torch's switches of its DTensor dispatcher. They do nothing here.

torch's context parallelism replaces how DTensors dispatch scaled_dot_product_attention, for the whole process. Here a
block or a module with the style intercepts its own calls, DTensors included, and nothing has to be enabled.
"""

from __future__ import annotations

from enum import Enum, auto


class _DispatchMode(Enum):
    MONKEY_PATCH = auto()
    MODULE_WRAPPER = auto()


_dispatch_mode = _DispatchMode.MONKEY_PATCH  # torch's default; it is not read


def _enable_context_parallel_dispatcher() -> None:
    """Do nothing: a block or a parallelized module intercepts its own attention calls without being enabled."""


def _disable_context_parallel_dispatcher() -> None:
    """Do nothing, like ``_enable_context_parallel_dispatcher``."""


def register_cp_sharding_rules() -> None:
    """Do nothing: inside a block, DTensors of ``Shard(2)`` are accepted without sharding rules."""


def unregister_cp_sharding_rules(clear_the_cache: bool = False) -> None:
    """Do nothing, like ``register_cp_sharding_rules``."""
