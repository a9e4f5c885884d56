"""Measure the time of a step on the device, on the host, and of each kernel."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ringspan.bench.graphs import captured

# The least duration of a timed round on a GPU, so that the host is ahead of it for most of the round, as in training.
ROUND_SECONDS = 0.25
# The first call of a plan is executed and compiles, the second is recorded, the third is replayed, and with CUDA graphs
# the fourth is captured.
WARM_UP = 4


def step_seconds(step: Callable[[], object], *, rounds: int, on_gpu: bool) -> float:
    """Return the seconds of one step: the median of the rounds, each of which ends with a synchronisation."""
    (seconds,) = seconds_in_turn([step], rounds=rounds, on_gpu=on_gpu)
    return seconds


def seconds_in_turn(steps: Sequence[Callable[[], object]], *, rounds: int, on_gpu: bool) -> list[float]:
    """Return the seconds of each step, as :func:`step_seconds` does. In each round every step is timed once.

    A GPU that has been busy for some seconds has lower clocks than one that was idle. Steps that are to be compared
    must therefore be timed in turn.
    """
    synchronize = _synchronize(on_gpu)

    def round_of(step: Callable[[], object], repeats: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        synchronize()
        return (time.perf_counter() - start) / repeats

    repeats = []
    for step in steps:
        for _ in range(WARM_UP if on_gpu else 1):
            round_of(step, 1)
        repeats.append(math.ceil(ROUND_SECONDS / round_of(step, 1)) if on_gpu else 1)
    timed = [[round_of(step, n) for step, n in zip(steps, repeats, strict=True)] for _ in range(rounds)]
    return [statistics.median(of_step) for of_step in zip(*timed, strict=True)]


def host_seconds(attention: Callable[..., Tensor], *qkv: Tensor) -> float:
    """Return the seconds of the host for one forward call. The host does not wait for the device."""
    with torch.no_grad():
        return _on_host(lambda: attention(*qkv), _synchronize(qkv[0].is_cuda))


def replay_seconds(attention: Callable[..., Tensor], *qkv: Tensor) -> float:
    """Return the seconds of the host for the replay of a captured forward call. 0 if it cannot be captured."""
    with torch.no_grad():
        replay = captured(lambda: attention(*qkv))
    return 0.0 if replay is None else _on_host(replay, torch.cuda.synchronize)


def device_profile(step: Callable[[], object]) -> dict[str, int]:
    """Return the microseconds of each kernel on the device in one step, the longest first."""
    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_device = [e for e in profiler.key_averages() if e.device_type.name == "CUDA"]
    longest = sorted((round(e.self_device_time_total), e.key) for e in on_device if not e.key.startswith("ringspan::"))
    return {name[:80]: time for time, name in reversed(longest)}


def _on_host(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Return the median of ten calls; the least of five such medians, because other processes can only make a call
    slower."""

    def seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    medians = []
    for _ in range(5):
        synchronize()
        medians.append(statistics.median(seconds() for _ in range(10)))
    synchronize()
    return min(medians)


def _synchronize(on_gpu: bool) -> Callable[[], None]:
    return torch.cuda.synchronize if on_gpu else lambda: None
