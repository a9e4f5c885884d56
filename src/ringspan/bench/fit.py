"""Fit the parameters of the cost model (``costs/plan_cost.py``) to measured times.

For a given tile size the time of a launch is linear in ``launch_s`` and in the reciprocal speed of each kind of band.
There are few possible tile sizes, so each is tried. The fit minimises relative errors. ``launch_s`` and the tile are
fitted to rectangles and bands with one diagonal, which every kernel computes in one launch. The speed of windows is
fitted afterwards, because some kernels compute a window block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.costs import Link, Speed
from ringspan.costs.plan_cost import flops_per_pair, tiled_area
from ringspan.masks import Band
from ringspan.plans import Shape
from ringspan.plans.data import PHASES, Phase

TILES = (1, 16, 32, 64, 128, 256, 512, 1024)
SIMPLE = 2  # kinds of bands: no diagonal, one. The third kind has two.


class TimedAttention(NamedTuple):
    """One call of the kernel with bands of one kind, and its time."""

    phase: Phase
    bands: tuple[Band, ...]
    seconds: float


class FittedKernel(NamedTuple):
    """The parameters of a kernel, and the mean relative error for rectangles and bands with one diagonal."""

    launch_s: float
    tile: int
    forward: Speed
    backward: Speed
    error: float


def fit_kernel(timed: Sequence[TimedAttention], shape: Shape) -> FittedKernel:
    """Return the parameters that fit the timed launches best. Each kind of band needs two sizes or more."""
    return min((_with_tile(timed, shape, tile) for tile in TILES), key=lambda found: found.error)


def _with_tile(timed: Sequence[TimedAttention], shape: Shape, tile: int) -> FittedKernel:
    seconds = np.array([launch.seconds for launch in timed])
    phase = np.array([PHASES.index(launch.phase) for launch in timed])
    flops = np.array(
        [np.array(tiled_area(x.bands, tile)) * shape.heads * flops_per_pair(shape, x.phase) for x in timed], dtype=np.float64
    )
    simple = flops[:, SIMPLE] == 0
    # Columns: one for launch_s, and for each phase one for each simple kind of band.
    by_phase = [np.where(phase[:, None] == p, flops[:, :SIMPLE], 0.0) for p in range(len(PHASES))]
    columns = np.column_stack([np.ones(len(timed)), *by_phase])
    found, error = _solve(columns[simple], seconds[simple])
    speeds = []
    for p, (full, causal) in enumerate((1 / found[1:]).reshape(len(PHASES), SIMPLE).tolist()):
        windows = (phase == p) & ~simple
        relative = flops[windows, SIMPLE] / seconds[windows]
        rest = np.maximum(1 - found[0] / seconds[windows], 1e-3)  # launch_s may not be all of a window's time
        window = float((relative**2).sum() / (relative * rest).sum())
        speeds.append(Speed(full=full, causal=causal, window=window))
    return FittedKernel(launch_s=float(found[0]), tile=tile, forward=speeds[0], backward=speeds[1], error=error)


class Message(NamedTuple):
    """A message that each of two ranks sent to the other at the same time, and its time."""

    size: int
    seconds: float


def fit_link(timed: Sequence[Message]) -> Link:
    columns = np.array([(1.0, message.size) for message in timed])
    (latency, of_a_byte), _ = _solve(columns, np.array([message.seconds for message in timed]))
    return Link(latency_s=float(latency), bytes_per_s=float(1 / of_a_byte))


def fit_overlap(computing: float, communication: float, both: float) -> float:
    """Return the fraction of the shorter of the two that was hidden when both ran at once."""
    hidden = (computing + communication - both) / min(computing, communication)
    return float(np.clip(hidden, 0.0, 1.0))


def _solve(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Solve the least squares of the relative errors, and the mean relative error that is left.

    The first unknown is a constant; if noise makes it negative, it is set to 0. If noise makes another unknown
    negative, it is set to the value with which the fastest measurement would consist of that term alone.
    """
    relative = columns / seconds[:, None]
    scale = np.abs(relative).max(axis=0)  # FLOP and seconds are twelve orders of magnitude apart
    found = np.linalg.lstsq(relative / scale, np.ones(len(seconds)), rcond=None)[0] / scale
    if found[0] < 0:
        found = np.append(0.0, np.linalg.lstsq(relative[:, 1:] / scale[1:], np.ones(len(seconds)), rcond=None)[0] / scale[1:])
    found[1:] = np.where(found[1:] > 0, found[1:], 1 / relative.max(axis=0)[1:])
    error = float(np.abs(relative @ found - 1).mean())
    return found, error
