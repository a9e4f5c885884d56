"""The fit recovers the machine from timings that the cost model computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.bench import calibration_rounds
from ringspan.bench.calibration_rounds import COPIES, MESSAGES, Probes, Round, this_machine, time_copy
from ringspan.bench.fit import TILES, FittedKernel, Message, TimedAttention, fit_copies, fit_kernel, fit_link, fit_overlap
from ringspan.costs import HARDWARE, Hardware, Speed
from ringspan.costs.plan_cost import task_seconds
from ringspan.plans.data import PHASES

SHAPE = rs.Shape(heads=4, kv_heads=4, head_dim=64, dtype="float32")
SHARED = rs.Shape(heads=32, kv_heads=8, head_dim=128)
TOKENS = (256, 512, 1024, 4096)
PROBES = Probes(shape=SHAPE, tokens=TOKENS)


def timings(machine: Hardware, shape: rs.Shape = SHAPE) -> list[TimedAttention]:
    """The times of the probes by the model."""
    plans = [rs.plan(mask, world=1, strategy="gather") for mask in PROBES.masks]
    tasks = [(plan, plan.program.forward[0].tasks[0]) for plan in plans]
    return [TimedAttention(p, task.bands, task_seconds(task, plan, machine, shape, p)) for plan, task in tasks for p in PHASES]


def machine_with(launch_s: float, tile: int, forward: Speed, backward: Speed, **options: float) -> Hardware:
    given = {name: getattr(HARDWARE["h200"], name) for name in ("name", "per_node", "within", "between", "memory", "source")}
    return Hardware(**given, launch_s=launch_s, tile=tile, forward=forward, backward=backward, **options)  # type: ignore[arg-type]


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
        if launch.bands[0].rows == launch.bands[0].cols
    ]
    found: FittedKernel = fit_kernel(quick, SHAPE)
    assert found.launch_s == 0
    assert found.forward.full > 1e11
    assert found.error > 0.01


# Tensor cores need so many bytes of rows for a figure of passes that can be measured.
tensor_cores = st.builds(Speed, **{kind: st.floats(1e14, 1e15) for kind in ("full", "causal", "window")})
passes = st.one_of(st.just(0.0), st.floats(0.5, 8.0))


@given(launch_s=st.floats(0, 1e-4), forward=tensor_cores, backward=tensor_cores, of_queries=passes, of_keys=passes)
def test_passes_over_rows_are_found_again(
    launch_s: float, forward: Speed, backward: Speed, of_queries: float, of_keys: float
) -> None:
    options = {"copy_bytes_per_s": 1e12, "query_passes": of_queries, "key_passes": of_keys}
    found = fit_kernel(timings(machine_with(launch_s, 128, forward, backward, **options), SHARED), SHARED)
    assert found.key_byte_s is not None
    assert (found.query_byte_s * 1e12, found.key_byte_s * 1e12) == pytest.approx((of_queries, of_keys), rel=1e-3, abs=1e-3)
    assert found.launch_s == pytest.approx(launch_s, rel=1e-3, abs=1e-9)
    assert found.error < 1e-6
    for got, want in ((found.forward, forward), (found.backward, backward)):
        assert (got.full, got.causal, got.window) == pytest.approx((want.full, want.causal, want.window), rel=1e-3)


def test_key_heads_that_are_not_shared_have_no_passes_to_measure() -> None:
    speed = Speed(full=1e14, causal=1e14, window=1e14)
    machine = machine_with(1e-5, 128, speed, speed, copy_bytes_per_s=1e12, query_passes=3.0, key_passes=2.0)
    found = fit_kernel(timings(machine), SHAPE)
    assert found.key_byte_s is None
    assert found.query_byte_s * 1e12 == pytest.approx(3.0, rel=1e-4)


def test_noise_does_not_make_passes_negative() -> None:
    """Many queries that take less time than few, in the backward pass."""
    speed = Speed(full=1e14, causal=1e14, window=1e14)
    machine = machine_with(1e-5, 128, speed, speed, copy_bytes_per_s=1e12, key_passes=2.0)
    timed = [
        launch._replace(seconds=launch.seconds * (0.9 if launch.bands[0].rows > launch.bands[0].cols else 1))
        for launch in timings(machine, SHARED)
    ]
    found = fit_kernel(timed, SHARED)
    assert found.query_byte_s == 0
    assert found.key_byte_s is not None
    assert found.key_byte_s * 1e12 == pytest.approx(2.0, rel=0.3)
    assert found.forward.full == pytest.approx(1e14, rel=0.1)


@pytest.mark.parametrize("shape", [SHAPE, SHARED])
def test_a_machine_is_found_again_from_rounds(shape: rs.Shape) -> None:
    """The forward pass of rectangles that are not square is not used, since the engine packs keys there."""
    probes = Probes(shape=shape, tokens=TOKENS)
    speed = Speed(full=1e14, causal=0.9e14, window=0.8e14)
    options = {"copy_bytes_per_s": 1.3e12, "copy_launch_s": 2e-6, "query_passes": 3.5, "key_passes": 2.5}
    machine = machine_with(2e-5, 128, speed, speed, **options)
    attention = np.array([launch.seconds for launch in timings(machine, shape)]).reshape(1, -1, len(PHASES))
    is_square = np.array([mask.lengths[0] == mask.lengths[1] for mask in probes.masks])
    assert (~is_square).sum() == 4
    attention[:, ~is_square, PHASES.index("forward")] *= 3
    copying = np.array([[2e-6 + size / 1.3e12 for size, _ in COPIES["cpu"]]])
    messages, overlap = np.array([[1e-5 + size / 1e10 for size in MESSAGES]]), np.array([[1.0, 1.0, 1.0]])
    slow = Round(2 * attention, 2 * copying, 2 * messages, overlap)
    found = this_machine([slow, Round(attention, copying, messages, overlap)], probes)
    for name in ("launch_s", *options):
        if name != "key_passes":
            assert getattr(found, name) == pytest.approx(getattr(machine, name), rel=1e-3), name
    assert found.key_passes == pytest.approx(2.5 if shape is SHARED else 0.0, rel=1e-3)
    assert found.backward.full == pytest.approx(1e14, rel=1e-3)


def test_a_copy_is_timed_alone_whatever_its_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 12.0])
    monkeypatch.setattr(calibration_rounds, "time_after_barrier", lambda f, _: (f(), (next(clock), next(clock))[1])[1:])
    assert time_copy(PROBES, 1 << 13, repeats=3) == 2.0


@given(launch=st.floats(1e-7, 1e-4), rate=st.floats(1e9, 1e13))
def test_copies_are_found_again(launch: float, rate: float) -> None:
    sizes = [size for size, _ in COPIES["cuda"]]
    found = fit_copies(sizes, [launch + size / rate for size in sizes])
    assert found == pytest.approx((launch, rate), rel=1e-4)


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
