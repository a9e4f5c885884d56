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
    forward=Speed(full=709.3e12, causal=696.4e12, window=756.9e12),
    backward=Speed(full=661.7e12, causal=673.1e12, window=804.6e12),
    launch_s=19.89e-6,
    tile=512,
    overlap=0.9,
    copy_bytes_per_s=1423e9,
    copy_launch_s=3.349e-6,
    query_passes=2.341,
    key_passes=6.292,
)
# Copies without launches and kernels without passes over rows, with which two choices were not the fastest.
WITHOUT = replace(CALIBRATED, copy_launch_s=0.0, query_passes=0.0, key_passes=0.0)

ULYSSES = "ulysses(heads=32, kv_heads=8, keep=True)"
# The strategies of the table that are within 2% of the fastest.
FASTEST = {
    "causal, 8,192": "exchange(stages=2)",
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


def test_launches_of_copies_decide_at_8192_tokens() -> None:
    """``ulysses`` copies the heads of seven messages in each direction. These are few bytes and many launches."""
    mask = MASKS["causal, 8,192"]()
    chosen = [rs.plan(mask, world=8, hardware=machine, shape=SHAPE).strategy for machine in (WITHOUT, CALIBRATED)]
    assert chosen == [ULYSSES, "exchange(stages=2)"]


# Clock and wire of the table, in ms. Its clocks are about 9% short (docs/benchmarks.md).
@pytest.mark.parametrize(
    ("name", "exchange_ms", "ulysses_ms"),
    [("causal, 8,192", 0.863, 0.945), ("causal, 65,536", 23.567, 22.960), ("prefix of 16,384, 65,536", 25.676, 24.338)],
)
def test_predictions_are_in_the_order_of_the_clock(name: str, exchange_ms: float, ulysses_ms: float) -> None:
    strategies = ("exchange(stages=2)", "ulysses")
    plans = [rs.plan(MASKS[name](), world=8, strategy=s, hardware=CALIBRATED, shape=SHAPE) for s in strategies]
    predicted = [plan.for_heads(32, 8).cost(CALIBRATED, SHAPE).seconds * 1e3 for plan in plans]
    assert (predicted[0] < predicted[1]) == (exchange_ms < ulysses_ms)
    assert predicted == pytest.approx([exchange_ms, ulysses_ms], rel=0.12)
