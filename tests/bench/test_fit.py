"""The fit recovers the machine from timings that the cost model computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.bench.calibration_rounds import Probes
from ringspan.bench.fit import TILES, FittedKernel, Message, TimedAttention, fit_kernel, fit_link, fit_overlap
from ringspan.costs import HARDWARE, Hardware, Speed
from ringspan.costs.plan_cost import task_seconds
from ringspan.plans.data import PHASES

SHAPE = rs.Shape(heads=4, kv_heads=4, head_dim=64, dtype="float32")
PROBES = Probes(shape=SHAPE, tokens=(256, 512, 1024, 4096))


def timings(machine: Hardware) -> list[TimedAttention]:
    """The times of the probes by the model."""
    plans = [rs.plan(mask, world=1, strategy="gather") for mask in PROBES.masks]
    tasks = [(plan, plan.program.forward[0].tasks[0]) for plan in plans]
    return [TimedAttention(p, task.bands, task_seconds(task, plan, machine, SHAPE, p)) for plan, task in tasks for p in PHASES]


def machine_with(launch_s: float, tile: int, forward: Speed, backward: Speed) -> Hardware:
    given = {name: getattr(HARDWARE["h200"], name) for name in ("name", "per_node", "within", "between", "memory", "source")}
    return Hardware(**given, launch_s=launch_s, tile=tile, forward=forward, backward=backward)


speeds = st.builds(Speed, **{kind: st.floats(1e9, 1e12) for kind in ("full", "causal", "window")})


@given(launch_s=st.floats(0, 1e-3), tile=st.sampled_from([t for t in TILES if t > 16]), forward=speeds, backward=speeds)
def test_a_kernel_is_found_again(launch_s: float, tile: int, forward: Speed, backward: Speed) -> None:
    found = fit_kernel(timings(machine_with(launch_s, tile, forward, backward)), SHAPE)
    assert found.error < 1e-6
    assert found.tile == tile
    assert found.launch_s == pytest.approx(launch_s, abs=1e-9, rel=1e-4)
    for got, want in ((found.forward, forward), (found.backward, backward)):
        assert (got.full, got.causal, got.window) == pytest.approx((want.full, want.causal, want.window), rel=1e-4)


def test_noise_does_not_make_a_launch_negative() -> None:
    speed = Speed(full=1e11, causal=1e11, window=1e11)
    quick = [
        launch._replace(seconds=launch.seconds * (0.7 if launch.bands[0].rows < 1000 else 1))
        for launch in timings(machine_with(0.0, 64, speed, speed))
    ]
    found: FittedKernel = fit_kernel(quick, SHAPE)
    assert found.launch_s == 0
    assert found.forward.full > 1e11
    assert found.error > 0.01


@given(latency=st.floats(1e-6, 1e-2), rate=st.floats(1e7, 1e11))
def test_a_link_is_found_again(latency: float, rate: float) -> None:
    found = fit_link([Message(size, latency + size / rate) for size in (1000, 10**6, 10**8)])
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((latency, rate), rel=1e-6)


@pytest.mark.parametrize(
    ("computing", "wire", "together", "overlap"),
    [(10, 4, 10, 1), (10, 4, 14, 0), (10, 4, 13, 0.25), (4, 10, 12, 0.5), (10, 4, 15, 0), (10, 4, 9, 1)],
)
def test_overlap_is_the_hidden_share_of_the_shorter(computing: float, wire: float, together: float, overlap: float) -> None:
    assert fit_overlap(computing, wire, together) == pytest.approx(overlap)


def test_no_noise_makes_a_cost_negative() -> None:
    """The larger message came sooner: its bytes alone would have taken what it took."""
    found = fit_link([Message(100, 3.0), Message(1000, 2.0)])
    assert found.latency_s >= 0
    assert found.bytes_per_s == pytest.approx(500)
