"""What ranks have to do in each step of a ring at least: see ``ring.py``."""

from __future__ import annotations

import numpy as np

from ringspan.costs.timeline import Loads, nearest, wire_seconds
from ringspan.costs.workload import Workload
from ringspan.plans.data import PHASES, Phase
from ringspan.strategies.ring import block_reach


def ring_loads(workload: Workload) -> dict[Phase, Loads]:
    """What comes from the rank before: the block of the next step and, one step behind, the gradient of the present one."""
    world, shape, machine = workload.world, workload.shape, workload.machine
    rows = np.array(workload.kv_layout.counts)
    reach = np.array(block_reach(workload.mask, workload.q_layout, workload.kv_layout))
    hops = int(reach.max())
    rank, row = np.array(workload.ranks)[:, None], np.arange(len(workload.ranks))[:, None]
    step = np.arange(hops + 2 if hops else 1)[None, :]
    block, coming = (rank - step) % world, (rank - step - 1) % world
    blocks = np.where(step + 1 <= reach[coming], rows[coming], 0)
    gradients = np.zeros_like(blocks)
    gradients[:, 2:] = blocks[:, 1:-1]
    is_near = workload.is_near[row, (rank - 1) % world]
    before = nearest(rank[:, 0], world)[(rank[:, 0] - 1) % world]
    found: dict[Phase, Loads] = {}
    for phase in PHASES:
        kv, dkv = blocks * shape.row_bytes("kv", phase), gradients * shape.row_bytes("dkv", phase)
        dkv *= phase == "backward"
        received = np.stack([(kv + dkv) * is_near, (kv + dkv) * ~is_near])
        found[phase] = Loads(
            workload.launched(np.where(step <= hops, workload.keys_travel.seconds[phase][row, block], 0.0)),
            wire_seconds(np.zeros_like(received), received, machine),
            dkv / machine.copy_bytes_per_s,
            [(who, before[who]) for who in map(np.flatnonzero, (kv + dkv).T)],
        )
    return found
