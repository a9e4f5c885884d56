"""Hierarchical: an exchange in which a key is sent once to each of the other nodes and forwarded there.

::

    per_node=2, key k of rank 0 that ranks 1, 2 and 3 see         rank 0  rank 1    node 0
                                                                  ──────────────    the slow link
                                                                  rank 2  rank 3    node 1

              communication                                       computing
    step 0    k: 0 → 1 in the node, 0 → 2 across                  own rows
    step 1    k: 2 → 3                                            rows from their owners
    step 2    –                                                   forwarded rows

    backward, after steps 0 and 1 as above
    step 2    dk: 1 → 0                                           forwarded rows
    step 3    dk: 3 → 2, where it is added to that of rank 2
    step 4    dk: 2 → 0, across, once for the node

On each other node a rank has a *forwarding rank*, the one with the same index there, so that all ranks of a node share
the work of sending. The forwarding rank receives the rows that any rank of its node sees, forwards them, and keeps them
until it has added up the gradients that come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.timeline import Loads, without_messages
from ringspan.costs.workload import Workload
from ringspan.layouts import Tiles, cut
from ringspan.masks.table import K0, K1
from ringspan.plans.data import PHASES, PayloadKind, Phase, Program, Slot, Step, Task, Transfer
from ringspan.plans.moving_side import KEYS, RowRanges
from ringspan.plans.problem import Problem, Rows, union
from ringspan.plans.shape import Shape
from ringspan.strategies.exchange import Exchange
from ringspan.strategies.incoming_rows import OWN, IncomingRows, assign_slot_rows, bands_by_stage, by_peer, split_at_spans
from ringspan.strategies.nodes import Nodes, check_per_node
from ringspan.strategies.protocol import Strategy

DIRECT, FORWARDED = 0, 1
SLOT = {OWN: 0, DIRECT: 1, FORWARDED: 2}


@dataclass(frozen=True, slots=True)
class Hierarchical(Strategy):
    """Exchange for nodes whose ranks see the same keys: a key is sent over the slow link once per node, not once per
    rank.

    The last node may have fewer ranks. On one node, or on nodes of one rank, nothing is forwarded, and the program is
    that of ``exchange(stages=1)``.
    """

    per_node: int = 8

    moving_side = KEYS

    def __post_init__(self) -> None:
        check_per_node(self.per_node)

    def __call__(self, problem: Problem) -> Program:
        nodes = Nodes(problem.world, self.per_node)
        return _fan_out(problem, nodes) if nodes.count > 1 and nodes.per_node > 1 else Exchange(stages=1)(problem)

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        """Count compute time only, no messages."""
        seconds = workload.demand(KEYS).seconds
        return {phase: without_messages(seconds[phase].sum(axis=1, keepdims=True)) for phase in PHASES}

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        return [cls(per_node=machine.per_node)] if machine.per_node < world else []

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        return {"per_node": range(1, world + 1)}


def _fan_out(problem: Problem, nodes: Nodes) -> Program:
    rank, world, node = problem.rank, problem.world, nodes.of(problem.rank)
    forwarder_of = [nodes.forwarder(owner, node) for owner in range(world)]  # of an owner here: itself
    near = [peer for peer in nodes.ranks(node) if peer != rank]
    forwarders = [nodes.forwarder(rank, other) for other in range(nodes.count) if other != node]
    # Owners on other nodes: those whose rows this rank receives from them and forwards (stage DIRECT), and those whose
    # rows another rank of this node forwards to it (stage FORWARDED).
    forwarded_here = [owner for owner in range(world) if nodes.of(owner) != node and forwarder_of[owner] == rank]
    forwarded_to_us = [owner for owner in range(world) if nodes.of(owner) != node and forwarder_of[owner] != rank]

    tiles = problem.seen()
    node_tiles = _of_node(problem, nodes, forwarded_here)
    placed = _incoming_rows(problem, tiles, node_tiles, forwarded_to_us)
    bands = bands_by_stage(KEYS, tiles, placed, rank)
    away = by_peer(placed.owner, placed.slot_row, placed.slot_row + placed.size)
    own_rows = _own_rows(problem, nodes)
    forwarded_rows = _forwarded_rows(problem, node_tiles, placed)

    def of_others(what: PayloadKind, owners: Sequence[int], stage: int) -> tuple[Transfer, ...]:
        """Return the transfers of these owners' rows that this rank holds: receives of keys, or sends of their
        gradients.

        The peer is the owner or, in stage FORWARDED, the owner's forwarding rank.
        """
        held = [(forwarder_of[o] if stage == FORWARDED else o, rows) for o in owners for rows in away.get(o, ())]
        return tuple(Transfer(what=what, peer=peer, slot=SLOT[stage], rows=rows) for peer, rows in held)

    def own(what: PayloadKind, peers: Sequence[int]) -> tuple[Transfer, ...]:
        """Return the transfers of the rank's own keys (or gradients) with these peers."""
        return tuple(Transfer(what=what, peer=p, slot=0, rows=rows) for p in peers for rows in own_rows.get(p, ()))

    def forwarded_keys(what: PayloadKind) -> tuple[Transfer, ...]:
        """Return the transfers of the keys (or gradients) that this rank forwards on its node."""
        held = [(peer, rows) for peer in near for o in forwarded_here for rows in forwarded_rows.get(peer * world + o, ())]
        return tuple(Transfer(what=what, peer=peer, slot=SLOT[DIRECT], rows=rows) for peer, rows in held)

    def tasks(stage: int) -> tuple[Task, ...]:
        if stage not in bands:
            return ()
        return (KEYS.task(SLOT[stage], bands[stage], None if stage == OWN else placed.tokens(stage)),)

    across = Step(
        sends=own("kv", [*near, *forwarders]),
        recvs=of_others("kv", [*near, *forwarded_here], DIRECT),
        tasks=tasks(OWN),
    )
    fan_out = Step(sends=forwarded_keys("kv"), recvs=of_others("kv", forwarded_to_us, FORWARDED), tasks=tasks(DIRECT))
    near_back = Step(sends=of_others("dkv", near, DIRECT), recvs=own("dkv", near), tasks=tasks(FORWARDED))
    fan_in = Step(sends=of_others("dkv", forwarded_to_us, FORWARDED), recvs=forwarded_keys("dkv"))
    back_across = Step(sends=of_others("dkv", forwarded_here, DIRECT), recvs=own("dkv", forwarders))
    return Program(
        forward=(across, fan_out, Step(tasks=tasks(FORWARDED))),
        backward=(across, fan_out, near_back, fan_in, back_across),
        q_slots=(Slot(rows=problem.q_rows),),
        kv_slots=(Slot(rows=problem.kv_rows), *(Slot(rows=placed.rows(stage)) for stage in (DIRECT, FORWARDED))),
    )


def _of_node(problem: Problem, nodes: Nodes, owners: Sequence[int]) -> Tiles:
    """Return the tiles of the queries of this node's ranks with the keys of these owners."""
    members = nodes.ranks(nodes.of(problem.rank))
    return cut(problem.mask, problem.q_layout.pieces.of(*members), problem.kv_layout.pieces.of(*owners))


def _incoming_rows(problem: Problem, tiles: Tiles, node_tiles: Tiles, forwarded_to_us: Sequence[int]) -> IncomingRows:
    """Return all rows that this rank receives: those it sees, and those that its node sees of the owners for which it
    forwards."""
    owner = np.concatenate([tiles.k_rank, node_tiles.k_rank])
    bands = np.concatenate([tiles.bands, node_tiles.bands])
    owner, start, stop = union(owner, bands[:, K0], bands[:, K1])
    away = owner != problem.rank
    rows = RowRanges(*(x[away] for x in (owner, np.full_like(owner, problem.rank), start, stop)))
    arriving, token, step = split_at_spans(problem.kv_layout, rows)
    return assign_slot_rows(arriving, token, step, np.where(np.isin(arriving.owner, forwarded_to_us), FORWARDED, DIRECT))


def _own_rows(problem: Problem, nodes: Nodes) -> dict[int, list[Rows]]:
    """Return the messages with this rank's own keys: to each peer on its node the rows that it sees, and to each
    forwarding rank the rows that any rank of its node sees."""
    tiles = problem.seeing()
    rank, node = problem.rank, nodes.of(problem.rank)
    receiver = np.array([q if nodes.of(q) == node else nodes.forwarder(rank, nodes.of(q)) for q in range(problem.world)])
    by, start, stop = union(receiver[tiles.q_rank], tiles.bands[:, K0], tiles.bands[:, K1])
    away = by != problem.rank
    rows = RowRanges(*(x[away] for x in (np.full_like(by, problem.rank), by, start, stop)))
    leaving, _, _ = split_at_spans(problem.kv_layout, rows)
    return by_peer(leaving.receiver, leaving.start, leaving.stop)


def _forwarded_rows(problem: Problem, node_tiles: Tiles, placed: IncomingRows) -> dict[int, list[Rows]]:
    """Return the messages that forward rows, as rows of the slot that holds them, by ``peer * world + owner``."""
    pair, start, stop = union(
        node_tiles.q_rank * problem.world + node_tiles.k_rank, node_tiles.bands[:, K0], node_tiles.bands[:, K1]
    )
    by, of = np.divmod(pair, problem.world)
    rows, _, _ = split_at_spans(problem.kv_layout, RowRanges(of, by, start, stop))
    hit = placed.find(rows.owner, rows.start)
    at = rows.start + (placed.slot_row - placed.start)[hit]
    return by_peer(rows.receiver * problem.world + rows.owner, at, at + rows.stop - rows.start)
