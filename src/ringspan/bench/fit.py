"""Fit the parameters of the cost model (``costs/plan_cost.py``) to measured times.

For a given tile size the time of a launch is linear in ``launch_s``, in the reciprocal speed of each kind of band and,
in the backward pass, in the bytes of its rows. There are few possible tile sizes, so each is tried. The fit minimises
relative errors. ``launch_s``, the tile and the passes over rows are fitted to rectangles and bands with one diagonal,
which every kernel computes in one launch. The speed of windows is fitted afterwards, because some kernels compute a
window block by block.

Rectangles with equally many pairs but other numbers of rows separate the time of rows from that of pairs.
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
FIXED = 3  # unknowns that do not depend on the pairs: a launch, a byte of a query, a byte of a key


class TimedAttention(NamedTuple):
    """One call of the kernel with bands of one kind, and its time."""

    phase: Phase
    bands: tuple[Band, ...]
    seconds: float


class FittedKernel(NamedTuple):
    """The parameters of a kernel, and the mean relative error for rectangles and bands with one diagonal.

    ``query_byte_s`` and ``key_byte_s`` are the seconds that its passes over rows take for a byte of queries, and of keys
    and values. ``key_byte_s`` is None if query heads do not share key heads: then there are no such passes over keys.
    """

    launch_s: float
    query_byte_s: float
    key_byte_s: float | None
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
    # Columns: one for launch_s, two for the bytes of rows, and for each phase one for each simple kind of band.
    fixed = np.array([(1.0, *_row_bytes(launch, shape)) for launch in timed])
    by_phase = [np.where(phase[:, None] == p, flops[:, :SIMPLE], 0.0) for p in range(len(PHASES))]
    columns = np.column_stack([fixed, *by_phase])
    found, error = _solve(columns[simple], seconds[simple], may_be_zero=FIXED)
    speeds = []
    for p, (full, causal) in enumerate((1 / found[FIXED:]).reshape(len(PHASES), SIMPLE).tolist()):
        windows = (phase == p) & ~simple
        relative = flops[windows, SIMPLE] / seconds[windows]
        # What does not depend on the pairs may not be all of a window's time.
        rest = np.maximum(1 - fixed[windows] @ found[:FIXED] / seconds[windows], 1e-3)
        window = float((relative**2).sum() / (relative * rest).sum())
        speeds.append(Speed(full=full, causal=causal, window=window))
    launch_s, query_byte_s, key_byte_s = found[:FIXED].tolist()
    return FittedKernel(
        launch_s=launch_s,
        query_byte_s=query_byte_s,
        key_byte_s=key_byte_s if shape.heads != shape.kv_heads else None,
        tile=tile,
        forward=speeds[0],
        backward=speeds[1],
        error=error,
    )


def _row_bytes(launch: TimedAttention, shape: Shape) -> tuple[int, int]:
    """Return the bytes of queries and of keys that a kernel makes passes over (``plan_cost.passes_row_bytes``)."""
    if launch.phase == "forward":
        return 0, 0
    queries, keys = sum(band.rows for band in launch.bands), sum(band.cols for band in launch.bands)
    is_shared = shape.heads != shape.kv_heads
    return queries * shape.row_bytes("q", "forward"), keys * shape.row_bytes("kv", "forward") * is_shared


class Message(NamedTuple):
    """A message that each of two ranks sent to the other at the same time, and its time."""

    size: int
    seconds: float


def fit_link(timed: Sequence[Message]) -> Link:
    latency, bytes_per_s = _fit_bytes([message.size for message in timed], [message.seconds for message in timed])
    return Link(latency_s=latency, bytes_per_s=bytes_per_s)


class FittedCopies(NamedTuple):
    """The time of the launch of a copy, and the bytes that copies move in a second."""

    launch_s: float
    bytes_per_s: float


def fit_copies(sizes: Sequence[int], seconds: Sequence[float]) -> FittedCopies:
    """Return the parameters that fit the times of one copy of each size."""
    return FittedCopies(*_fit_bytes(sizes, seconds))


def _fit_bytes(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return a constant time, and bytes per second."""
    columns = np.array([(1.0, size) for size in sizes])
    (constant, of_a_byte), _ = _solve(columns, np.array(seconds), may_be_zero=1)
    return float(constant), float(1 / of_a_byte)


def fit_overlap(computing: float, communication: float, both: float) -> float:
    """Return the fraction of the shorter of the two that was hidden when both ran at once."""
    hidden = (computing + communication - both) / min(computing, communication)
    return float(np.clip(hidden, 0.0, 1.0))


def _solve(
    columns: NDArray[np.float64], seconds: NDArray[np.float64], *, may_be_zero: int
) -> tuple[NDArray[np.float64], float]:
    """Solve the least squares of the relative errors, and the mean relative error that is left.

    If noise makes any of the first ``may_be_zero`` unknowns negative, it is set to 0, and so is one that no measurement
    depends on. If noise makes another unknown negative, it is set to the value with which the fastest measurement would
    consist of that term alone.
    """
    relative = columns / seconds[:, None]
    scale = np.abs(relative).max(axis=0)  # FLOP and seconds are twelve orders of magnitude apart
    used = scale > 0
    while True:
        found = np.zeros(len(scale))
        found[used] = np.linalg.lstsq(relative[:, used] / scale[used], np.ones(len(seconds)), rcond=None)[0]
        lowest = int(np.argmin(found[:may_be_zero]))
        if found[lowest] >= 0:
            break
        used[lowest] = False
    found[used] /= scale[used]
    rest = slice(may_be_zero, None)
    found[rest] = np.where(found[rest] > 0, found[rest], 1 / scale[rest])
    error = float(np.abs(relative @ found - 1).mean())
    return found, error
