"""Names that ``ringspan.plans`` had while it held all of planning. They still work, with a DeprecationWarning.

``ringspan/__init__.py`` installs the table, so that ``ringspan.plans`` itself imports nothing from the packages above
it.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from ringspan import plans
from ringspan.caching import clear_caches

# old name in ringspan.plans -> where it is now
MOVED = {
    **dict.fromkeys(("HARDWARE", "Cost", "Hardware", "Link", "Speed", "named_hardware"), "ringspan.costs"),
    **dict.fromkeys(("STRATEGIES", "Strategy", "parse_strategy", "strategy_for_heads"), "ringspan.strategies"),
    **dict.fromkeys(
        ("Exchange", "Gather", "Hierarchical", "Hybrid", "PassQ", "Ring", "Ulysses"),
        "ringspan.strategies",
    ),
    **dict.fromkeys(("Candidate", "Choice", "Plan", "best_on", "plan", "plan_rank"), "ringspan.planner"),
    **dict.fromkeys(("bytes_moved", "cost", "memory_bytes", "peak_bytes"), "ringspan.planner"),
    "register_strategy": "ringspan.planner",
    "forget": "ringspan",
    "Scene": "ringspan.plans",
}
RENAMED = {"Scene": "Problem", "forget": "clear_caches"}


def install() -> None:
    """Let ``ringspan.plans`` find these names."""
    setattr(plans, "__getattr__", _find)  # noqa: B010


def _find(name: str) -> Any:
    if name not in MOVED:
        raise AttributeError(f"module 'ringspan.plans' has no attribute {name!r}")
    new = f"{MOVED[name]}.{RENAMED.get(name, name)}"
    warnings.warn(f"ringspan.plans.{name} is now {new}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(MOVED[name]), RENAMED.get(name, name))


def forget() -> None:
    """Deprecated: the former name of :func:`ringspan.clear_caches`."""
    warnings.warn("ringspan.planner.forget is now ringspan.clear_caches", DeprecationWarning, stacklevel=2)
    clear_caches()
