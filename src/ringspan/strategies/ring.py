"""Ring: every block of keys walks from neighbour to neighbour.

::

    ring, 3 ranks       rank 0   rank 1   rank 2
    step 0              kv0      kv1      kv2      → to the next rank while computing
    step 1              kv2      kv0      kv1
    step 2              kv1      kv2      kv0

A block walks only as far as somebody still sees it. Backward, the blocks walk the same way again; the gradient of a
block follows one step behind it, collecting each rank's share, and goes home from the last one. Two blocks of memory
beside the own, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts import Layout
from ringspan.masks import Mask
from ringspan.plans.data import Program, Slot, Step, Task, Transfer
from ringspan.plans.problem import Problem, bands_by_group, seen_ranks
from ringspan.plans.slot_tokens import home_tokens


@dataclass(frozen=True, slots=True)
class Ring:
    """Neighbour to neighbour."""

    def __call__(self, problem: Problem) -> Program:
        world, rank = problem.world, problem.rank
        rows = problem.kv_layout.counts
        reach = block_reach(problem.mask, problem.q_layout, problem.kv_layout)
        tiles = problem.seen()
        bands = bands_by_group(tiles.bands, tiles.k_rank)
        hops = max(reach)
        block_tokens = home_tokens(problem.kv_layout)

        def travels(block: int, hop: int) -> bool:
            """Whether the block makes its ``hop``-th step away from home."""
            return rows[block] > 0 and hop <= reach[block]

        def held(step: int) -> int:
            return (rank - step) % world

        def slot(step: int) -> int:
            return 0 if step == 0 else 1 + (step - 1) % 2

        def moves(step: int) -> Step:
            sends, recvs = [], []
            block, coming = held(step), held(step + 1)
            if travels(block, step + 1):
                sends.append(_block("kv", (rank + 1) % world, slot(step), rows[block]))
            if travels(coming, step + 1):
                recvs.append(_block("kv", (rank - 1) % world, slot(step + 1), rows[coming]))
            seen = bands.get(block, ())
            tokens = block_tokens[block] if step else None
            tasks = (Task(kv_slot=slot(step), bands=seen, kv_tokens=tokens),) if seen else ()
            return Step(sends=tuple(sends), recvs=tuple(recvs), tasks=tasks)

        def gradients(step: int) -> Step:
            """The block computed in the last step hands its gradient on; that of the present block comes in."""
            sends, recvs = [], []
            if step >= 2 and travels(held(step - 1), step - 1):
                left = held(step - 1)
                goes_home = reach[left] == step - 1
                sends.append(_block("dkv", left if goes_home else (rank + 1) % world, slot(step - 1), rows[left]))
            if step >= 2 and travels(held(step), step):
                recvs.append(_block("dkv", (rank - 1) % world, slot(step), rows[held(step)]))
            if step >= 2 and reach[rank] == step - 1 and rows[rank]:
                recvs.append(_block("dkv", (rank + step - 1) % world, 0, rows[rank]))
            return Step(sends=tuple(sends), recvs=tuple(recvs))

        forward = tuple(moves(step) for step in range(hops + 1))
        backward = tuple(
            _both(moves(step) if step <= hops else Step(), gradients(step)) for step in range(hops + 2 if hops else 1)
        )
        visiting = [[rows[held(s)] for s in range(1, hops + 1) if slot(s) == k and travels(held(s), s)] for k in (1, 2)]
        slots = [rows[rank], *(max(sizes, default=0) for sizes in visiting)]
        return Program(
            forward=forward,
            backward=backward,
            q_slots=(Slot(rows=problem.q_rows),),
            kv_slots=tuple(Slot(rows=n) for n in slots),
        )


@cache_by_digest(64)
def block_reach(mask: Mask, q_layout: Layout, kv_layout: Layout) -> list[int]:
    """For each block, how many steps the furthest rank that sees any of it is away."""
    sees = seen_ranks(mask, q_layout, kv_layout)
    ranks = np.arange(q_layout.world)
    distance = (ranks[:, None] - ranks[None, :]) % q_layout.world
    return [int(x) for x in np.where(sees, distance, 0).max(axis=0)]


def _block(what: str, peer: int, slot: int, rows: int) -> Transfer:
    return Transfer(what=what, peer=peer, slot=slot, rows=((0, rows),))  # type: ignore[arg-type]


def _both(a: Step, b: Step) -> Step:
    return Step(sends=a.sends + b.sends, recvs=a.recvs + b.recvs, tasks=a.tasks + b.tasks)
