"""Former names of the packages. They still work, with a DeprecationWarning.

``ringspan/__init__.py`` installs the table. It lies here because the packages named in it must not import what is above
them, and ``frontends`` may import all of them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def _moved(package: str, names: str) -> dict[str, str]:
    return {name: f"{package}.{name}" for name in names.split()}


# package -> {its former name: where it is now}
OLD_NAMES: dict[str, dict[str, str]] = {
    "ringspan.masks": {"Settler": "ringspan.masks.Predicate"},
    "ringspan.plans": {
        **_moved("ringspan.costs", "HARDWARE Cost Hardware Link Speed named_hardware"),
        **_moved("ringspan.strategies", "STRATEGIES Strategy parse_strategy strategy_for_heads"),
        **_moved("ringspan.strategies", "Exchange Gather Hierarchical Hybrid PassQ Ring Ulysses"),
        **_moved("ringspan.planner", "Candidate Choice Plan best_on plan plan_rank register_strategy"),
        **_moved("ringspan.planner", "bytes_moved cost memory_bytes peak_bytes"),
        "Scene": "ringspan.plans.Problem",
        "forget": "ringspan.clear_caches",
    },
    "ringspan.kernels": {
        "Accumulator": "ringspan.kernels.OutputAccumulator",
        "Part": "ringspan.kernels.PartialRows",
        "PlacedMods": "ringspan.kernels.IndexedMods",
        "Sum": "ringspan.kernels.GradientAccumulator",
        "lacking": "ringspan.kernels.missing_packages",
        "pick": "ringspan.kernels.select_kernel",
        "reasons": "ringspan.kernels.availability",
        "wide": "ringspan.kernels.accumulation_dtype",
    },
    "ringspan.transports": {
        "Hello": "ringspan.transports.RankSignature",
        "InProcess": "ringspan.transports.InProcessTransport",
        "Post": "ringspan.transports.PostExchange",
        "ProcessGroup": "ringspan.transports.ProcessGroupTransport",
        "Wait": "ringspan.transports.WaitExchange",
        "Walk": "ringspan.transports.RankGenerator",
        "as_process_group": "ringspan.transports.as_transport",
        "compare": "ringspan.transports.first_disagreement",
        "digest_number": "ringspan.transports.digest_as_int64",
        "tell_invalid": "ringspan.transports.report_refusal",
    },
    "ringspan.engine": {
        "Call": "ringspan.engine.AttentionConfig",
        "attend_by_ticket": "ringspan.engine.attend_by_id",
        "is_watched": "ringspan.engine.is_traced",
    },
}


def install() -> None:
    """Let each package of the table find its former names."""
    for package, names in OLD_NAMES.items():
        setattr(importlib.import_module(package), "__getattr__", _finder(package, names))  # noqa: B010


def _finder(package: str, names: dict[str, str]) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, new_name = names[name].rpartition(".")
        warnings.warn(f"{package}.{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), new_name)

    return find
