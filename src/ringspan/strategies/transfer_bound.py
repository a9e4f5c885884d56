"""A lower bound of the time to receive keys, for strategies that move keys whether they are visible or not."""

from __future__ import annotations

from ringspan.costs.workload import Workload
from ringspan.plans.data import PHASES
from ringspan.plans.problem import Ints


def receiving_seconds(workload: Workload, near: Ints, far: Ints) -> float:
    """Return the time of the rank that waits longest for this many rows of keys from its own node and from others.

    Keys are received in both phases. Latency, gradients and compute are not counted.
    """
    row = sum(workload.message_row_bytes("kv", phase) for phase in PHASES)
    within, between = workload.machine.within, workload.machine.between
    most_near, most_far = (int(rows.max(initial=0)) for rows in (near, far))
    return row * max(most_near / within.bytes_per_s, most_far / between.bytes_per_s)
