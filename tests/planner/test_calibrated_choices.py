"""What ``auto`` chooses on an H200, with the calibration in docs/benchmarks.md, against what was the fastest by the clock
there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import ringspan as rs
from ringspan.costs import HARDWARE, Link, Speed

SHAPE = rs.Shape(heads=32, kv_heads=8, head_dim=128)

# The table of `ringspan bench calibrate` in docs/benchmarks.md.
CALIBRATED = replace(
    HARDWARE["h200"],
    within=Link(latency_s=5e-6, bytes_per_s=360e9),
    forward=Speed(full=693.7e12, causal=710.8e12, window=742.2e12),
    backward=Speed(full=634.5e12, causal=671.0e12, window=792.9e12),
    launch_s=12.66e-6,
    tile=512,
    overlap=0.9,
    copy_bytes_per_s=1427e9,
    copy_launch_s=3.29e-6,
    query_passes=1.996,
    key_passes=6.975,
)
ULYSSES = "ulysses(heads=32, kv_heads=8, keep=True)"
# The strategies of the table that are within 2% of the fastest.
FASTEST = {
    "causal, 8,192": ULYSSES,
    "causal, 16,384": ULYSSES,
    "causal, 32,768": ULYSSES,
    "causal, 65,536": ULYSSES,
    "causal, 131,072": ULYSSES,
    "full, 32,768": ULYSSES,
    "window of 4,096, 65,536": "exchange(stages=1)",
    "window of 4,096, 131,072": "exchange(stages=1)",
    "prefix of 16,384, 65,536": ULYSSES,
    "28 documents, 131,072": "exchange(stages=1)",
    "200 documents, 131,072": "exchange(stages=1)",
    "28 documents, window of 4,096, 131,072": "exchange(stages=1)",
}


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
    assert rs.plan(MASKS[name](), world=8, hardware=CALIBRATED, shape=SHAPE).strategy == FASTEST[name]


# Clock and wire of the table, in ms.
@pytest.mark.parametrize(
    ("name", "exchange_ms", "ulysses_ms"),
    [("causal, 8,192", 0.875, 0.781), ("causal, 65,536", 26.473, 25.468), ("prefix of 16,384, 65,536", 29.202, 27.423)],
)
def test_predictions_are_in_the_order_of_the_clock(name: str, exchange_ms: float, ulysses_ms: float) -> None:
    strategies = ("exchange(stages=2)", "ulysses")
    plans = [rs.plan(MASKS[name](), world=8, strategy=s, hardware=CALIBRATED, shape=SHAPE) for s in strategies]
    predicted = [plan.for_heads(32, 8).cost(CALIBRATED, SHAPE).seconds * 1e3 for plan in plans]
    assert (predicted[0] < predicted[1]) == (exchange_ms < ulysses_ms)
    assert predicted == pytest.approx([exchange_ms, ulysses_ms], rel=0.15)
