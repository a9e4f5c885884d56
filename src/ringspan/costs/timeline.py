"""The timeline of all ranks: when each begins and ends each step, computing while messages are under way.

A step of a rank begins when its previous step has ended. The messages of a rank in a step start together, when the rank
and all its peers of that step have begun the step. All messages that a rank sends over a link share that link, and so
do all that it receives. The step ends after its tasks and its own communication (latency and transfer), and then
packing, unpacking and merging. Congestion at a peer is not modelled. If several exchanges are in flight, a step ends
after the communication of an earlier step, and the exchanges of a rank take place one after the other::

    rank 0   |== compute 0 ==|=== compute 1 ===|........|== compute 2 ==|
             |~~ comm 0 ~~|  |~~~~~~~~ comm 1 ~~~~~~~~~~|                  dots: exposed time

The drawing assumes an ``overlap`` of 1. For a smaller overlap, computing and sending slow each other down, and the step
is extended by ``(1 - overlap) * min(compute, communication)``. Packing, unpacking and merging overlap with nothing.

The caller may pass a sample of the ranks (planner/samples.py). A peer outside the sample is assumed to have the
timeline of the sampled rank with the nearest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.costs.hardware import Hardware
from ringspan.plans.data import completed_exchanges

Seconds = NDArray[np.float64]
Ints = NDArray[np.int64]

# Indices of ranks, and for each the index of a peer that it exchanges messages with.
RankPeers = tuple[Ints, Ints]
NO_PEERS: RankPeers = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)


class Loads(NamedTuple):
    """Seconds that each rank (row) spends in each step (column).

    ``peers`` has for each step the pairs of ranks that exchange messages. ``in_flight`` is that of the program.
    """

    computing: Seconds
    communication: Seconds
    copying: Seconds
    peers: Sequence[RankPeers]
    in_flight: int = 1


class Timeline(NamedTuple):
    """When each rank (row) begins each step (column), finishes its tasks, and ends it. In seconds from the start of the
    phase."""

    begin: Seconds
    computed: Seconds
    end: Seconds

    @property
    def seconds(self) -> float:
        return float(self.end.max(initial=0.0))

    @property
    def exposed(self) -> Seconds:
        """The time of each rank that is not compute: waiting for messages, copies, merging, contention."""
        exposed: Seconds = (self.end - self.computed).sum(axis=1)
        return exposed


def simulate(loads: Loads, overlap: float) -> Timeline:
    """Return the timeline of all ranks through all steps."""
    if loads.in_flight == 1:
        return _simulate_one_in_flight(loads, overlap)
    steps, lag = loads.computing.shape[1], loads.in_flight - 1
    hiding = sum(_later(loads.computing, n) for n in range(lag + 1))  # the computing while messages are in flight
    extra = (1 - overlap) * np.minimum(hiding, loads.communication) + loads.copying
    begin, computed, end, arrival = (np.zeros_like(loads.computing) for _ in range(4))
    now, link_is_free = (np.zeros(len(loads.computing)) for _ in range(2))
    for n in range(steps):
        ready = np.maximum(now, link_is_free)
        posted = ready.copy()
        row, peer = loads.peers[n]
        np.maximum.at(posted, row, ready[peer])
        begin[:, n] = now
        computed[:, n] = now + loads.computing[:, n]
        communication = loads.communication[:, n]
        arrival[:, n] = np.where(communication > 0, posted + communication, 0.0)
        link_is_free = np.maximum(link_is_free, arrival[:, n])
        ending = completed_exchanges(n, steps, loads.in_flight)
        arrived = arrival[:, ending.start : ending.stop].max(axis=1, initial=0.0)
        now = np.maximum(computed[:, n], arrived) + extra[:, n]
        end[:, n] = now
    return Timeline(begin, computed, end)


def _simulate_one_in_flight(loads: Loads, overlap: float) -> Timeline:
    """Do :func:`simulate` for programs whose steps end with their own exchange. Arrays have a row for each step
    here."""
    computing, communication = np.ascontiguousarray(loads.computing.T), np.ascontiguousarray(loads.communication.T)
    extra = (1 - overlap) * np.minimum(computing, communication) + loads.copying.T
    is_sent = communication > 0
    begin, computed, end = (np.zeros_like(computing) for _ in range(3))
    now = np.zeros(computing.shape[1])
    for n, (row, peer) in enumerate(loads.peers):
        begin[n] = now
        computed[n] = now + computing[n]
        posted = now.copy()
        np.maximum.at(posted, row, now[peer])
        arrived = np.where(is_sent[n], posted + communication[n], 0.0)
        now = np.maximum(computed[n], arrived) + extra[n]
        end[n] = now
    return Timeline(*(np.ascontiguousarray(x.T) for x in (begin, computed, end)))


def _later(seconds: Seconds, steps: int) -> Seconds:
    """Return the seconds of this many steps later, 0 after the last."""
    shifted = np.zeros_like(seconds)
    shifted[:, : max(0, seconds.shape[1] - steps)] = seconds[:, steps:]
    return shifted


def communication_seconds(sent: Seconds | Ints, received: Seconds | Ints, machine: Hardware) -> Seconds:
    """Return the time that the messages of a step take once both sides have posted them.

    ``sent`` and ``received`` are bytes of shape (2, ranks, steps): within the node, and between nodes. Both links work
    at the same time and in both directions, so the time is the maximum. Latency counts once for each link, however many
    messages there are.
    """
    size = np.maximum(sent, received)
    links = zip((machine.within, machine.between), size, strict=True)
    within, between = (np.where(x > 0, link.latency_s + x / link.bytes_per_s, 0.0) for link, x in links)
    return np.maximum(within, between)


def nearest(ranks: Ints, world: int) -> Ints:
    """Return, for each rank of the world, the index of the nearest of the given ranks; its own index, if it is one of
    them.

    >>> nearest(np.array([0, 4, 5]), 6).tolist()
    [0, 0, 0, 1, 1, 2]
    """
    world_ranks = np.arange(world)
    after = np.minimum(np.searchsorted(ranks, world_ranks), len(ranks) - 1)
    before = np.maximum(after - 1, 0)
    is_nearer = np.abs(world_ranks - ranks[before]) <= np.abs(ranks[after] - world_ranks)
    return np.where(is_nearer, before, after)


def without_messages(computing: Seconds) -> Loads:
    """Return the loads of ranks that only compute."""
    return Loads(computing, np.zeros_like(computing), np.zeros_like(computing), [NO_PEERS] * computing.shape[1])
