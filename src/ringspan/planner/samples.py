"""A sample of ranks, for worlds that are too large to plan every rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ringspan.costs.hardware import Hardware
from ringspan.costs.workload import Workload
from ringspan.layouts import Layout, areas
from ringspan.masks import Mask
from ringspan.plans.problem import estimated_tiles, needed_rows

# Up to this many tiles, the rows that each rank needs are counted. With more, nearly every rank needs nearly all keys,
# so all ranks need about equally many.
MAX_COUNTED_TILES = 2**21


def sample(mask: Mask, q_layout: Layout, kv_layout: Layout, machine: Hardware, most: int) -> tuple[int, ...]:
    """Return at most ``most`` ranks, in order: the one with the most work, those that wait longest for their keys, the
    one with the least work, and the rest evenly spaced.

    >>> from ringspan.layouts import contiguous
    >>> from ringspan.masks import causal
    >>> from ringspan.costs.hardware import HARDWARE
    >>> layout = contiguous(causal(64), 16)
    >>> sample(causal(64), layout, layout, HARDWARE["h200"], 5)
    (0, 4, 8, 11, 15)
    """
    if q_layout.world <= most:
        return tuple(range(q_layout.world))
    work = areas(mask, q_layout)
    longest = np.argsort(-_transfer_time(mask, q_layout, kv_layout, machine), kind="stable")[: max(1, most // 4)].tolist()
    extremes = list(dict.fromkeys((int(work.argmax()), *longest, int(work.argmin()))))[:most]
    chosen = set(extremes)
    evenly = np.linspace(0, q_layout.world - 1, most).round().astype(int).tolist()
    for rank in sorted(evenly, key=lambda rank: min(abs(rank - other) for other in extremes), reverse=True):
        if len(chosen) < most:  # the evenly spaced ranks nearest to an extreme are left out
            chosen.add(rank)
    return tuple(sorted(chosen))


def sampled(workload: Workload, most: int) -> Workload:
    """Return the workload with at most ``most`` of its ranks."""
    ranks = sample(workload.mask, workload.q_layout, workload.kv_layout, workload.machine, most)
    return replace(workload, ranks=ranks)


def _transfer_time(mask: Mask, q_layout: Layout, kv_layout: Layout, machine: Hardware) -> NDArray[np.float64]:
    """Return the time of each rank's slower link for the keys it receives or sends, in rows per byte/s."""
    world = q_layout.world
    if estimated_tiles(mask, q_layout, kv_layout) > MAX_COUNTED_TILES:
        return np.zeros(world)
    rows = needed_rows(mask, q_layout, kv_layout) * (1 - np.eye(world, dtype=np.int64))
    node = np.arange(world) // machine.per_node
    is_near = node[:, None] == node[None, :]
    links = ((machine.within, rows * is_near), (machine.between, rows * ~is_near))
    return np.max([np.maximum(x.sum(axis=0), x.sum(axis=1)) / link.bytes_per_s for link, x in links], axis=0)
