"""Ranks that walk their steps, computing while messages travel.

A step of a rank begins when its last one has ended. Its messages start when both sides have posted them; all that a rank sends
over a link shares that link, and so does all that it receives. The step ends when its tasks are computed and its messages are
there::

    rank 0   |== compute 0 ==|=== compute 1 ===|........|== compute 2 ==|
             |~~ wire 0 ~~|  |~~~~~~~~ wire 1 ~~~~~~~~~~|                  the dots are exposed

That is a machine whose ``overlap`` is 1. Where it is less, computing and sending slow each other down, and the step is longer
by the rest of the shorter of the two. What has to be copied together before it travels, or apart when it has come, hides
nowhere, nor does merging what queries get in parts.

Where there are too many ranks to look at, a sample walks: a peer that is not in it keeps pace with the nearest that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.costs.hardware import Hardware

Seconds = NDArray[np.float64]
Ints = NDArray[np.int64]

# Rows of ranks and, beside each, the row of one that it exchanges messages with.
Pairs = tuple[Ints, Ints]
NO_PEERS: Pairs = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)


class Loads(NamedTuple):
    """What each rank (row) has to do in each step (column), in seconds, and for each step who has to wait for whom."""

    computing: Seconds
    wire: Seconds
    copying: Seconds
    meets: Sequence[Pairs]


class Timeline(NamedTuple):
    """When each rank (row) begins each step (column), has computed it, and ends it; in seconds from the start of the phase."""

    begin: Seconds
    computed: Seconds
    end: Seconds

    @property
    def seconds(self) -> float:
        return float(self.end.max(initial=0.0))

    @property
    def exposed(self) -> Seconds:
        """How long being split keeps each rank beyond its computing: waiting, copying, merging, being slowed down."""
        waited: Seconds = (self.end - self.computed).sum(axis=1)
        return waited


def simulate(loads: Loads, overlap: float) -> Timeline:
    """All ranks through all steps."""
    longer = (1 - overlap) * np.minimum(loads.computing, loads.wire) + loads.copying
    begin, computed, end = (np.zeros_like(loads.computing) for _ in range(3))
    now = np.zeros(len(loads.computing))
    for n in range(loads.computing.shape[1]):
        posted = now.copy()
        row, peer = loads.meets[n]
        np.maximum.at(posted, row, now[peer])
        begin[:, n] = now
        computed[:, n] = now + loads.computing[:, n]
        now = np.maximum(computed[:, n], np.where(loads.wire[:, n] > 0, posted + loads.wire[:, n], 0.0)) + longer[:, n]
        end[:, n] = now
    return Timeline(begin, computed, end)


def wire_seconds(sent: Seconds | Ints, received: Seconds | Ints, machine: Hardware) -> Seconds:
    """How long messages take once both sides have posted them, of their bytes within the node (first) and between nodes: the
    slower of the two links, which work at the same time, each both ways."""
    size = np.maximum(sent, received)
    links = zip((machine.within, machine.between), size, strict=True)
    within, between = (np.where(x > 0, link.latency_s + x / link.bytes_per_s, 0.0) for link, x in links)
    return np.maximum(within, between)


def nearest(ranks: Ints, world: int) -> Ints:
    """For each rank of the world, which of the given ones, in order, is nearest: itself, if it is among them.

    >>> nearest(np.array([0, 4, 5]), 6).tolist()
    [0, 0, 0, 1, 1, 2]
    """
    everybody = np.arange(world)
    after = np.minimum(np.searchsorted(ranks, everybody), len(ranks) - 1)
    before = np.maximum(after - 1, 0)
    is_nearer = np.abs(everybody - ranks[before]) <= np.abs(ranks[after] - everybody)
    return np.where(is_nearer, before, after)


def without_messages(computing: Seconds) -> Loads:
    """Loads of ranks that only compute."""
    return Loads(computing, np.zeros_like(computing), np.zeros_like(computing), [NO_PEERS] * computing.shape[1])
