"""From timings to what a machine is: the cost model (``plans/cost.py``) read backwards.

What a launch takes is linear in ``launch_s`` and in one over the speed of each kind of band, once the tile is known; there are
few sizes a tile can have, so each is tried. Every equation counts by its relative error. Rectangles and bands of one diagonal,
which every kernel does in one launch, say what a launch and a tile are; the speed in windows is then what makes theirs true,
since some kernels do them block by block.
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


class Launch(NamedTuple):
    """One call of the kernel: bands of one kind, and how long it took."""

    phase: Phase
    bands: tuple[Band, ...]
    seconds: float


class Kernel(NamedTuple):
    """What was found, and the mean relative error that is left in rectangles and bands of one diagonal."""

    launch_s: float
    tile: int
    forward: Speed
    backward: Speed
    error: float


def fit_kernel(timed: Sequence[Launch], shape: Shape) -> Kernel:
    """The kernel whose launches would have taken what they took, as nearly as can be. Each kind needs two sizes or more."""
    return min((_with_tile(timed, shape, tile) for tile in TILES), key=lambda found: found.error)


def _with_tile(timed: Sequence[Launch], shape: Shape, tile: int) -> Kernel:
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
        rest = np.maximum(1 - found[0] / seconds[windows], 1e-3)  # a launch cannot be all that a window took
        window = float((relative**2).sum() / (relative * rest).sum())
        speeds.append(Speed(full=full, causal=causal, window=window))
    return Kernel(launch_s=float(found[0]), tile=tile, forward=speeds[0], backward=speeds[1], error=error)


class Message(NamedTuple):
    """What two ranks sent to each other at the same time, and how long it took."""

    size: int
    seconds: float


def fit_link(timed: Sequence[Message]) -> Link:
    columns = np.array([(1.0, message.size) for message in timed])
    (latency, of_a_byte), _ = _solve(columns, np.array([message.seconds for message in timed]))
    return Link(latency_s=float(latency), bytes_per_s=float(1 / of_a_byte))


def fit_overlap(computing: float, wire: float, together: float) -> float:
    """The share of the shorter of the two that was hidden when both ran at once."""
    hidden = (computing + wire - together) / min(computing, wire)
    return float(np.clip(hidden, 0.0, 1.0))


def _solve(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Least squares of the relative errors. The first unknown is a constant, which noise must not make negative; where it makes
    another so, as if more took no longer, the quickest measurement is taken to have been nothing but that."""
    relative = columns / seconds[:, None]
    scale = np.abs(relative).max(axis=0)  # FLOP and seconds are twelve orders of magnitude apart
    found = np.linalg.lstsq(relative / scale, np.ones(len(seconds)), rcond=None)[0] / scale
    if found[0] < 0:
        found = np.append(0.0, np.linalg.lstsq(relative[:, 1:] / scale[1:], np.ones(len(seconds)), rcond=None)[0] / scale[1:])
    found[1:] = np.where(found[1:] > 0, found[1:], 1 / relative.max(axis=0)[1:])
    error = float(np.abs(relative @ found - 1).mean())
    return found, error
