"""What ``auto`` chooses on an H200, with the calibration in docs/benchmarks.md, against what was the fastest by the clock
there. Two of its choices were not the fastest when copies had no launches and kernels no passes over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import ringspan as rs
from ringspan.costs import HARDWARE, Link, Speed

SHAPE = rs.Shape(heads=32, kv_heads=8, head_dim=128)

# The table of `ringspan bench calibrate` in docs/benchmarks.md, from before the last three fields were added.
OLD = replace(
    HARDWARE["h200"],
    within=Link(latency_s=5e-6, bytes_per_s=360e9),
    forward=Speed(full=701.3e12, causal=696.0e12, window=717.6e12),
    backward=Speed(full=640.5e12, causal=635.9e12, window=680.9e12),
    launch_s=27.33e-6,
    tile=512,
    overlap=0.9,
    copy_bytes_per_s=1323e9,
    copy_launch_s=0.0,
    query_passes=0.0,
    key_passes=0.0,
)
NEW = replace(OLD, **{name: getattr(HARDWARE["h200"], name) for name in ("copy_launch_s", "query_passes", "key_passes")})

# The strategies of the table that are within 2% of the fastest.
FASTEST = {
    "causal, 8,192": {"exchange(stages=2)"},
    "causal, 16,384": {"exchange(stages=2)"},
    "causal, 32,768": {"exchange(stages=2)"},
    "causal, 65,536": {"exchange(stages=2)"},
    "causal, 131,072": {"exchange(stages=2)"},
    "full, 32,768": {"exchange(stages=1)", "exchange(stages=2)"},
    "window of 4,096, 65,536": {"exchange(stages=1)"},
    "window of 4,096, 131,072": {"exchange(stages=1)", "exchange(stages=2)"},
    "prefix of 16,384, 65,536": {"ulysses(heads=32, kv_heads=8)"},
    "28 documents, 131,072": {"exchange(stages=1)"},
    "200 documents, 131,072": {"exchange(stages=1)"},
    "28 documents, window of 4,096, 131,072": {"exchange(stages=1)"},
}
WRONG_BEFORE = {"causal, 8,192", "prefix of 16,384, 65,536"}


def masks() -> dict[str, Callable[[], rs.Mask]]:
    """Return the masks of benchmarks/choices.py."""
    spec = spec_from_file_location("choices", Path(__file__).parents[2] / "benchmarks" / "choices.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Callable[[], rs.Mask]] = module.CASES
    return found


MASKS = masks()


def test_every_case_of_the_benchmark_is_here() -> None:
    assert set(FASTEST) == set(MASKS)


@pytest.mark.parametrize("name", FASTEST)
def test_the_fastest_by_the_clock_is_chosen(name: str) -> None:
    old, new = (rs.plan(MASKS[name](), world=8, hardware=machine, shape=SHAPE).strategy for machine in (OLD, NEW))
    assert new in FASTEST[name]
    assert (old not in FASTEST[name]) == (name in WRONG_BEFORE)


@pytest.mark.parametrize(
    ("name", "exchange_ms", "ulysses_ms"), [("causal, 8,192", 0.91, 1.10), ("prefix of 16,384, 65,536", 26.21, 25.26)]
)
def test_the_two_that_were_wrong_are_predicted_in_the_order_of_the_clock(
    name: str, exchange_ms: float, ulysses_ms: float
) -> None:
    """Clock and wire of the table. The calibration includes the passes in its speeds, so predictions are a little
    high."""
    plans = [rs.plan(MASKS[name](), world=8, strategy=s, hardware=NEW, shape=SHAPE) for s in ("exchange(stages=2)", "ulysses")]
    predicted = [plan.for_heads(32, 8).cost(NEW, SHAPE).seconds * 1e3 for plan in plans]
    assert (predicted[0] < predicted[1]) == (exchange_ms < ulysses_ms)
    assert predicted == pytest.approx([exchange_ms, ulysses_ms], rel=0.15)
