"""Every name that ``ringspan.plans`` had still works, and says where it is now."""

from __future__ import annotations

import warnings

import pytest

import ringspan as rs
import ringspan.plans
from ringspan.planner import best_on
from ringspan.planner.old_names import MOVED

# ringspan.plans.__all__ before costs, strategies and planner became packages
OLD = [
    "HARDWARE",
    "STRATEGIES",
    "Candidate",
    "Choice",
    "Cost",
    "Exchange",
    "Gather",
    "Hardware",
    "Hierarchical",
    "Hybrid",
    "Link",
    "PassQ",
    "Plan",
    "Program",
    "Ring",
    "Scene",
    "Shape",
    "Slot",
    "Speed",
    "Step",
    "Strategy",
    "Task",
    "Transfer",
    "Ulysses",
    "best_on",
    "bytes_moved",
    "cost",
    "forget",
    "memory_bytes",
    "named_hardware",
    "needed_rows",
    "parse_strategy",
    "peak_bytes",
    "plan",
    "plan_rank",
    "register_strategy",
    "strategy_for_heads",
    "verify",
]


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_still_works(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert getattr(ringspan.plans, name) is not None
    said = [str(w.message) for w in caught if w.category is DeprecationWarning]
    assert len(said) == (name in MOVED)
    assert all(text.startswith(f"ringspan.plans.{name} is now ringspan.") for text in said)


def test_every_moved_name_is_an_old_one() -> None:
    assert set(MOVED) <= set(OLD)


def test_an_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match=r"module 'ringspan.plans' has no attribute 'no_such'"):
        ringspan.plans.no_such  # noqa: B018


def test_old_functions_fit_the_heads_first() -> None:
    plan = rs.plan(rs.causal(16), world=2, strategy="ulysses")
    shape = rs.Shape(heads=6, kv_heads=2, head_dim=8)
    with pytest.warns(DeprecationWarning, match="memory_bytes is now"):
        assert ringspan.plans.memory_bytes(plan, shape, "forward") > 0


def test_hear_is_the_old_name_of_on_progress() -> None:
    told: list[str] = []
    with pytest.warns(DeprecationWarning, match=r"best_on\(hear=...\) is now best_on\(on_progress=...\)"):
        best_on(rs.causal(64), world=2, hardware="h200x8", hear=lambda share, name: told.append(name))
    assert told
