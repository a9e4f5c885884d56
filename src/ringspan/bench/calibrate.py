"""Measure this machine for the cost model. The result is a :class:`~ringspan.costs.Hardware`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ringspan.bench.calibration_rounds import Probes, Round, as_round, this_gpu, this_machine, time_round
from ringspan.bench.rows import OnProgress, Row, ignore_progress
from ringspan.costs import Hardware, named_hardware
from ringspan.testing.workers import Pool


def calibrate(probes: Probes, *, world: int, like: str, rounds: int, on_progress: OnProgress = ignore_progress) -> Hardware:
    """Measure one GPU, or ``world`` processes on the CPU. One GPU cannot measure links: they are those of ``like``."""

    def measure(one_round: Callable[[], Any]) -> list[Round]:
        found = []
        for n in range(rounds):
            on_progress(n, rounds, f"round {n + 1} of {rounds}")
            found.append(as_round(one_round()))
        return found

    if probes.device == "cuda":
        return this_gpu(measure(lambda: [time_round(0, probes)]), probes, named_hardware(like))
    with Pool(world, threads=1, timeout=1800) as pool:
        return this_machine(measure(lambda: pool.run(time_round, probes)), probes)


def hardware_rows(machine: Hardware) -> Iterator[Row]:
    """Yield a row for each figure of a machine."""

    def row(what: str, value: float, unit: str) -> dict[str, Any]:
        return {"what": what, "value": float(f"{value:.4g}"), "unit": unit}

    for phase, speed in (("forward", machine.forward), ("backward", machine.backward)):
        for kind, flops in (("rectangles", speed.full), ("one diagonal", speed.causal), ("two diagonals", speed.window)):
            yield row(f"{phase}, {kind}", flops / 1e9, "GFLOP/s")
    yield row("launch", machine.launch_s * 1e6, "µs")
    yield row("tile", machine.tile, "tokens")
    yield row("link, latency", machine.within.latency_s * 1e6, "µs")
    yield row("link, both ways at once", machine.within.bytes_per_s / 1e9, "GB/s")
    yield row("overlap", machine.overlap, "of what could be hidden")
    yield row("copying", machine.copy_bytes_per_s / 1e9, "GB/s")
    yield row("copying, launch", machine.copy_launch_s * 1e6, "µs")
    yield row("backward, passes over queries", machine.query_passes, "copies")
    yield row("backward, passes over keys", machine.key_passes, "copies")
    yield row("memory", machine.memory / 2**30, "GiB for each rank")
