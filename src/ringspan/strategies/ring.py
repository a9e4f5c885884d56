"""Ring: every block of keys is passed from neighbour to neighbour.

::

    ring, 3 ranks       rank 0   rank 1   rank 2
    step 0              kv0      kv1      kv2      → to the next rank while computing
    step 1              kv2      kv0      kv1
    step 2              kv1      kv2      kv0

A block is passed on only up to the last rank that sees any of it. In the backward pass the blocks take the same path
again. The gradient of a block follows one step behind it, each rank adds its part, and the last rank sends it to the
owner. For any number of ranks, a rank holds two blocks beside its own, and in the backward pass also their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.costs.hardware import Hardware
from ringspan.costs.plan_cost import copying_seconds
from ringspan.costs.timeline import Loads, communication_seconds, nearest
from ringspan.costs.workload import Workload
from ringspan.layouts import Layout
from ringspan.masks import Mask
from ringspan.masks import table as tables
from ringspan.plans.columns import Messages, ProgramColumns, Tasks
from ringspan.plans.data import PHASES, Phase, Program, Slot, Step, Task, Transfer
from ringspan.plans.moving_side import KEYS
from ringspan.plans.problem import (
    MAX_TILES_AT_ONCE,
    Problem,
    bands_by_group,
    estimated_tiles,
    needed_rows,
    seen_ranks,
    whole_tiles,
)
from ringspan.plans.shape import Shape
from ringspan.plans.slot_tokens import own_tokens
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.transfer_bound import receiving_seconds


@dataclass(frozen=True, slots=True)
class Ring(Strategy):
    """Pass blocks of keys from neighbour to neighbour."""

    moving_side = KEYS

    def __call__(self, problem: Problem) -> Program:
        world, rank = problem.world, problem.rank
        rows = problem.kv_layout.counts
        reach = block_reach(problem.mask, problem.q_layout, problem.kv_layout)
        tiles = problem.seen()
        bands = bands_by_group(tiles.bands, tiles.k_rank)
        hops = max(reach)
        block_tokens = own_tokens(problem.kv_layout)

        def is_sent(block: int, hop: int) -> bool:
            """Return whether the block is sent on to its ``hop``-th rank after its owner."""
            return rows[block] > 0 and hop <= reach[block]

        def held(step: int) -> int:
            return (rank - step) % world

        def slot(step: int) -> int:
            return 0 if step == 0 else 1 + (step - 1) % 2

        def pass_block(step: int) -> Step:
            """Compute with this step's block and send it to the next rank; receive the next step's block."""
            sends, recvs = [], []
            block, coming = held(step), held(step + 1)
            if is_sent(block, step + 1):
                sends.append(_block("kv", (rank + 1) % world, slot(step), rows[block]))
            if is_sent(coming, step + 1):
                recvs.append(_block("kv", (rank - 1) % world, slot(step + 1), rows[coming]))
            seen = bands.get(block, ())
            tokens = block_tokens[block] if step else None
            tasks = (Task(kv_slot=slot(step), bands=seen, kv_tokens=tokens),) if seen else ()
            return Step(sends=tuple(sends), recvs=tuple(recvs), tasks=tasks)

        def pass_gradients(step: int) -> Step:
            """Send the gradient of the previous step's block to the next rank; receive that of this step's block."""
            sends, recvs = [], []
            if step >= 2 and is_sent(held(step - 1), step - 1):
                previous = held(step - 1)
                is_last = reach[previous] == step - 1
                sends.append(_block("dkv", previous if is_last else (rank + 1) % world, slot(step - 1), rows[previous]))
            if step >= 2 and is_sent(held(step), step):
                recvs.append(_block("dkv", (rank - 1) % world, slot(step), rows[held(step)]))
            if step >= 2 and reach[rank] == step - 1 and rows[rank]:
                recvs.append(_block("dkv", (rank + step - 1) % world, 0, rows[rank]))
            return Step(sends=tuple(sends), recvs=tuple(recvs))

        forward = tuple(pass_block(step) for step in range(hops + 1))
        backward = tuple(
            _both(pass_block(step) if step <= hops else Step(), pass_gradients(step)) for step in range(hops + 2 if hops else 1)
        )
        block_rows = [[rows[held(s)] for s in range(1, hops + 1) if slot(s) == k and is_sent(held(s), s)] for k in (1, 2)]
        slots = [rows[rank], *(max(sizes, default=0) for sizes in block_rows)]
        return Program(
            forward=forward,
            backward=backward,
            q_slots=(Slot(rows=problem.q_rows),),
            kv_slots=tuple(Slot(rows=n) for n in slots),
        )

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        return _loads(workload)

    def transfer_seconds(self, workload: Workload) -> float:
        return _transfer_seconds(workload)

    def columns(self, workload: Workload) -> ProgramColumns:
        return _columns(workload)

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        return [cls()] if world > 2 else []  # with two ranks, exchange sends no more, in as many steps


@cache_by_digest(64)
def block_reach(mask: Mask, q_layout: Layout, kv_layout: Layout) -> list[int]:
    """Return, for each block, the distance from its owner to the last rank that sees any of it."""
    few_tiles = estimated_tiles(mask, q_layout, kv_layout) <= MAX_TILES_AT_ONCE
    sees = needed_rows(mask, q_layout, kv_layout) > 0 if few_tiles else seen_ranks(mask, q_layout, kv_layout)
    ranks = np.arange(q_layout.world)
    distance = (ranks[:, None] - ranks[None, :]) % q_layout.world
    return [int(x) for x in np.where(sees, distance, 0).max(axis=0)]


def _block(what: str, peer: int, slot: int, rows: int) -> Transfer:
    return Transfer(what=what, peer=peer, slot=slot, rows=((0, rows),))  # type: ignore[arg-type]


def _both(a: Step, b: Step) -> Step:
    return Step(sends=a.sends + b.sends, recvs=a.recvs + b.recvs, tasks=a.tasks + b.tasks)


def _transfer_seconds(workload: Workload) -> float:
    """Return a lower bound of the time in which a rank receives the blocks that pass it, all from the rank before
    it."""
    world, rank = workload.world, np.array(workload.ranks)
    hop = (rank[:, None] - np.arange(world)[None, :]) % world
    reach = np.array(block_reach(workload.mask, workload.q_layout, workload.kv_layout))
    rows = ((hop > 0) & (hop <= reach[None, :])) @ np.array(workload.kv_layout.counts)
    is_near = workload.is_near[np.arange(len(rank)), (rank - 1) % world]
    return receiving_seconds(workload, rows * is_near, rows * ~is_near)


def _loads(workload: Workload) -> dict[Phase, Loads]:
    """Return a lower bound of the seconds of each step. A rank receives the block of the next step and, one step later,
    its gradient. The last transfer of a gradient, to the owner, is not counted."""
    world, machine = workload.world, workload.machine
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
        kv = blocks * workload.message_row_bytes("kv", phase)
        dkv = gradients * workload.message_row_bytes("dkv", phase)
        dkv *= phase == "backward"
        received = np.stack([(kv + dkv) * is_near, (kv + dkv) * ~is_near])
        found[phase] = Loads(
            workload.launched(np.where(step <= hops, workload.demand(KEYS).seconds[phase][row, block], 0.0)),
            communication_seconds(np.zeros_like(received), received, machine),
            copying_seconds(dkv, np.sign(dkv), machine),
            [(who, before[who]) for who in map(np.flatnonzero, (kv + dkv).T)],
        )
    return found


def _columns(workload: Workload) -> ProgramColumns:
    """Return the programs of all ranks. ``hop`` counts the ranks that a block has been passed on to."""
    world, rows = workload.world, np.array(workload.kv_layout.counts)
    reach = np.array(block_reach(workload.mask, workload.q_layout, workload.kv_layout))
    hops = int(reach.max())
    passed = np.where(rows > 0, reach, 0)
    block = np.repeat(np.arange(world), passed)
    hop = tables.ranges(np.ones_like(passed), passed)
    holder, one, unpacked = (block + hop) % world, np.ones_like(block), np.zeros_like(block)
    blocks = Messages("kv", (holder - 1) % world, holder, hop - 1, rows[block], one, unpacked, unpacked)
    goes_home = hop == reach[block]  # the gradient of a block, from the last rank that sees the block
    receiver = np.where(goes_home, block, (holder + 1) % world)
    gradients = Messages("dkv", holder, receiver, hop + 1, rows[block], one, unpacked, unpacked)
    slots = np.zeros((world, 3), dtype=np.int64)
    slots[:, 0] = rows
    np.maximum.at(slots, (holder, 1 + (hop - 1) % 2), rows[block])
    tiles = whole_tiles(workload.mask, workload.q_layout, workload.kv_layout)
    bands, group = tables.coalesce_grouped(tiles.bands, tiles.q_rank * world + (tiles.q_rank - tiles.k_rank) % world)
    first = np.flatnonzero(np.diff(group, prepend=-1))
    rank, step = np.divmod(group[first], world)
    kv_slot = np.where(step > 0, 1 + (step - 1) % 2, 0)
    return ProgramColumns(
        world=world,
        steps={"forward": hops + 1, "backward": hops + 2 if hops else 1},
        tasks=Tasks(rank, step, np.zeros_like(step), kv_slot, bands, first),
        messages={"forward": (blocks,), "backward": (blocks, gradients)},
        q_slots=np.array(workload.q_layout.counts)[:, None],
        kv_slots=slots,
        dkv_dtype=workload.dkv_dtype,
    )
