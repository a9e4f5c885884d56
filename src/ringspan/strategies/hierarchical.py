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

With ``pieces=m``, the rows that cross are sent in m pieces, in a pipeline. Piece p makes each of these steps p steps
later, except that its rows are computed together when the forwarded ones have arrived: one task instead of two, whose
results are merged once. The rank's own rows and those of its node are split over all steps, so that every step has
about equal work::

    pieces=2, backward    step 0     step 1     step 2     step 3     step 4     step 5
    across                piece 0    piece 1
    fan-out                          piece 0    piece 1
    compute               own        own        own, 0     own, 1     own        own
    gradients in the node                                  piece 0    piece 1
    gradients across                                                  piece 0    piece 1

On each other node a rank has a *forwarding rank*, the one with the same index there, so that all ranks of a node share
the work of sending. The forwarding rank receives the rows that any rank of its node sees, forwards them, and keeps them
until it has added up the gradients that come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.timeline import Loads, without_messages
from ringspan.costs.workload import Workload
from ringspan.errors import PlanError
from ringspan.layouts import Tiles, cut
from ringspan.masks import Band
from ringspan.masks.table import K0, K1
from ringspan.plans.columns import ProgramColumns
from ringspan.plans.data import PHASES, PayloadKind, Phase, Program, Slot, Step, Task, Transfer
from ringspan.plans.moving_side import KEYS, RowRanges
from ringspan.plans.problem import Ints, Problem, Rows, union
from ringspan.plans.shape import Shape
from ringspan.strategies.crossing_pieces import CrossingPieces, make_pieces, spread, step_weights
from ringspan.strategies.exchange import Exchange
from ringspan.strategies.hierarchical_columns import hierarchical_columns
from ringspan.strategies.incoming_rows import OWN, IncomingRows, assign_slot_rows, bands_by_stage, by_peer, split_at_spans
from ringspan.strategies.nodes import Nodes, check_per_node
from ringspan.strategies.protocol import Strategy

# The automatic choice considers this number of pieces, from this number of nodes on.
PIECES = 6
NODES_FOR_PIECES = 16
# Each piece is a step and a slot. Over 1,024 ranks, a plan with so many is made in two seconds and 170 MB.
MAX_PIECES = 64


@dataclass(frozen=True, slots=True)
class Hierarchical(Strategy):
    """Exchange for nodes whose ranks see the same keys: a key is sent over the slow link once per node, not once per
    rank.

    The last node may have fewer ranks. On one node, or on nodes of one rank, nothing is forwarded, and the program is
    that of ``exchange(stages=1)``. Rows that cross are sent in ``pieces``, so that more of their messages are hidden
    behind compute.
    """

    per_node: int = 8
    pieces: int = 1

    moving_side = KEYS

    def __post_init__(self) -> None:
        check_per_node(self.per_node)
        if not isinstance(self.pieces, int) or self.pieces < 1:
            raise PlanError(f"pieces must be an integer of at least 1; got {self.pieces!r}")
        if self.pieces > MAX_PIECES:
            raise PlanError(
                f"pieces must be at most {MAX_PIECES}; got {self.pieces}: each is a step of its own, few are enough"
            )

    def __call__(self, problem: Problem) -> Program:
        nodes = Nodes(problem.world, self.per_node)
        if nodes.count == 1 or nodes.per_node == 1:
            return Exchange(stages=1)(problem)
        return _fan_out(problem, nodes, self.pieces)

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        """Count compute time only, no messages."""
        seconds = workload.demand(KEYS).seconds
        return {phase: without_messages(seconds[phase].sum(axis=1, keepdims=True)) for phase in PHASES}

    def columns(self, workload: Workload) -> ProgramColumns | None:
        nodes = Nodes(workload.world, self.per_node)
        if nodes.count == 1 or nodes.per_node == 1:
            return Exchange(stages=1).columns(workload)
        return hierarchical_columns(workload, nodes) if self.pieces == 1 else None

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        if machine.per_node >= world:
            return []
        # Over few nodes pieces save little, and each candidate costs planning time.
        in_pieces = machine.per_node > 1 and world >= NODES_FOR_PIECES * machine.per_node
        return [cls(per_node=machine.per_node), *([cls(per_node=machine.per_node, pieces=PIECES)] if in_pieces else [])]

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        return {"per_node": range(1, world + 1), "pieces": range(1, 4)}


def _fan_out(problem: Problem, nodes: Nodes, count: int) -> Program:
    rank, world, node = problem.rank, problem.world, nodes.of(problem.rank)
    forwarder_of = [nodes.forwarder(owner, node) for owner in range(world)]  # owners of this node: themselves
    near = [peer for peer in nodes.ranks(node) if peer != rank]
    # Owners on other nodes: those whose rows this rank receives from them and forwards, and those whose rows another
    # rank of this node forwards to it.
    forwarded_here = [owner for owner in range(world) if nodes.of(owner) != node and forwarder_of[owner] == rank]
    forwarded_to_us = [owner for owner in range(world) if nodes.of(owner) != node and forwarder_of[owner] != rank]
    stages = _Stages(count)
    pieces = make_pieces(problem.mask, problem.q_layout, problem.kv_layout, nodes, count)
    split = replace(problem, kv_layout=pieces.layout)
    tiles = split.seen()
    node_tiles = _of_node(split, nodes, forwarded_here)
    placed = _incoming_rows(problem, pieces, tiles, node_tiles, near, forwarded_to_us)
    bands = bands_by_stage(KEYS, tiles, placed, rank)
    transfers = _Transfers(
        world=world,
        stages=stages,
        forwarder_of=forwarder_of,
        near=near,
        forwarders=[nodes.forwarder(rank, other) for other in range(nodes.count) if other != node],
        forwarded_here=forwarded_here,
        forwarded_to_us=forwarded_to_us,
        away=by_peer(placed.owner * count + stages.piece(placed.stage), placed.slot_row, placed.slot_row + placed.size),
        own_rows=_own_rows(problem, split, nodes, pieces),
        forwarded_rows=_forwarded_rows(split, node_tiles, placed, pieces),
    )

    def steps(phase: Phase) -> tuple[Step, ...]:
        made = []
        for n, parts in enumerate(_bands_of_steps(bands, stages, pieces, phase)):
            sends, recvs = transfers.exchanged(n, phase)
            tasks = tuple(_task(placed, stage, part) for stage, part in parts if part)
            made.append(Step(sends=tuple(sends), recvs=tuple(recvs), tasks=tasks))
        return tuple(made)

    return Program(
        forward=steps("forward"),
        backward=steps("backward"),
        q_slots=(Slot(rows=problem.q_rows),),
        kv_slots=(Slot(rows=problem.kv_rows), *(Slot(rows=placed.rows(stage)) for stage in range(stages.number))),
    )


class _Stages(NamedTuple):
    """Stages of received rows. Each has a slot.

    With one piece: the rows of this node and those that come from their owners on other nodes, then those that were
    forwarded. With several: the rows of each piece, whoever sends them, so that they are computed by one task, and then
    the rows of this node.
    """

    pieces: int

    @property
    def number(self) -> int:
        return 2 if self.pieces == 1 else self.pieces + 1

    @property
    def near(self) -> int:
        return 0 if self.pieces == 1 else self.pieces

    def forwarded(self, piece: int) -> int:
        return 1 if self.pieces == 1 else piece

    def piece(self, stage: Ints) -> Ints:
        """Return the piece of each of these stages, 0 for the rows of this node."""
        return np.zeros_like(stage) if self.pieces == 1 else np.where(stage == self.near, 0, stage)

    def steps(self, phase: Phase) -> int:
        return self.pieces + (2 if phase == "forward" else 4)


# The bands that a rank computes in a step, by stage.
_StageBands = list[tuple[int, tuple[Band, ...]]]


def _bands_of_steps(
    bands: Mapping[int, tuple[Band, ...]], stages: _Stages, pieces: CrossingPieces, phase: Phase
) -> list[_StageBands]:
    """Return the bands of each step. With several pieces, the bands of the rank's own rows and of those of its node are
    split over all steps."""
    count = stages.steps(phase)
    made: list[_StageBands] = [[] for _ in range(count)]
    own, near = bands.get(OWN, ()), bands.get(stages.near, ())
    if stages.pieces == 1:
        for n, stage in enumerate((OWN, stages.near, stages.forwarded(0))):
            made[n].append((stage, bands.get(stage, ())))
        return made
    crossing = [bands.get(n - 2, ()) if 2 <= n < stages.pieces + 2 else () for n in range(count)]
    busy = [sum(band.area for band in of_step) for of_step in crossing]
    near_until = count if phase == "forward" else count - 1
    weights = step_weights(stages.pieces, count, pieces.most_crossing)
    for n, (of_own, of_near) in enumerate(zip(*spread(own, near, busy, weights, near_until), strict=True)):
        made[n] += [(OWN, of_own), (stages.near, of_near), (n - 2, crossing[n])]
    return made


def _task(placed: IncomingRows, stage: int, bands: tuple[Band, ...]) -> Task:
    return KEYS.task(0, bands, None) if stage == OWN else KEYS.task(_slot(stage), bands, placed.tokens(stage))


class _Transfers(NamedTuple):
    """The transfers of one rank, step by step.

    ``away``, ``own_rows`` and ``forwarded_rows`` are the messages with rows of others that this rank holds, with its
    own rows, and with the rows that it forwards.
    """

    world: int
    stages: _Stages
    forwarder_of: Sequence[int]
    near: Sequence[int]
    forwarders: Sequence[int]
    forwarded_here: Sequence[int]
    forwarded_to_us: Sequence[int]
    away: Mapping[int, Sequence[Rows]]
    own_rows: Mapping[int, Sequence[Rows]]
    forwarded_rows: Mapping[int, Sequence[Rows]]

    def of_near(self, what: PayloadKind) -> list[Transfer]:
        """Return the transfers of this node's rows that this rank holds: receives of keys, or sends of gradients."""
        return self._of_others(what, self.stages.near, 0, ((owner, owner) for owner in self.near))

    def direct(self, what: PayloadKind, piece: int) -> list[Transfer]:
        """Return the transfers with the owners for which this rank forwards."""
        return self._of_others(what, piece, piece, ((owner, owner) for owner in self.forwarded_here))

    def forwarded(self, what: PayloadKind, piece: int) -> list[Transfer]:
        """Return the transfers with the ranks of this node that forward rows to this rank."""
        peers = ((owner, self.forwarder_of[owner]) for owner in self.forwarded_to_us)
        return self._of_others(what, self.stages.forwarded(piece), piece, peers)

    def _of_others(self, what: PayloadKind, stage: int, piece: int, peers: Iterable[tuple[int, int]]) -> list[Transfer]:
        """Return the transfers of a piece of others' rows, given pairs of an owner and the peer."""
        held = ((peer, rows) for owner, peer in peers for rows in self.away.get(owner * self.stages.pieces + piece, ()))
        return [Transfer(what=what, peer=peer, slot=_slot(stage), rows=rows) for peer, rows in held]

    def own(self, what: PayloadKind, peers: Sequence[int], piece: int) -> list[Transfer]:
        """Return the transfers of the rank's own keys (or gradients) of a piece with these peers."""
        held = [(peer, rows) for peer in peers for rows in self.own_rows.get(peer * self.stages.pieces + piece, ())]
        return [Transfer(what=what, peer=peer, slot=0, rows=rows) for peer, rows in held]

    def forwarded_keys(self, what: PayloadKind, piece: int) -> list[Transfer]:
        """Return the transfers of the keys (or gradients) of a piece that this rank forwards on its node."""
        keys = [(peer, (peer * self.world + o) * self.stages.pieces + piece) for peer in self.near for o in self.forwarded_here]
        held = [(peer, rows) for peer, key in keys for rows in self.forwarded_rows.get(key, ())]
        return [Transfer(what=what, peer=peer, slot=_slot(piece), rows=rows) for peer, rows in held]

    def exchanged(self, n: int, phase: Phase) -> tuple[list[Transfer], list[Transfer]]:
        """Return the sends and receives of a step."""
        sends: list[Transfer] = []
        recvs: list[Transfer] = []
        pieces = self.stages.pieces
        if n == 0:
            sends += self.own("kv", self.near, 0)
            recvs += self.of_near("kv")
        if n < pieces:
            sends += self.own("kv", self.forwarders, n)
            recvs += self.direct("kv", n)
        if 0 <= n - 1 < pieces:
            sends += self.forwarded_keys("kv", n - 1)
            recvs += self.forwarded("kv", n - 1)
        if phase == "forward":
            return sends, recvs
        if n == (2 if pieces == 1 else self.stages.steps(phase) - 1):
            sends += self.of_near("dkv")
            recvs += self.own("dkv", self.near, 0)
        if 0 <= n - 3 < pieces:
            sends += self.forwarded("dkv", n - 3)
            recvs += self.forwarded_keys("dkv", n - 3)
        if 0 <= n - 4 < pieces:
            sends += self.direct("dkv", n - 4)
            recvs += self.own("dkv", self.forwarders, n - 4)
        return sends, recvs


def _slot(stage: int) -> int:
    return 1 + stage


def _of_node(problem: Problem, nodes: Nodes, owners: Sequence[int]) -> Tiles:
    """Return the tiles of the queries of this node's ranks with the keys of these owners."""
    members = nodes.ranks(nodes.of(problem.rank))
    return cut(problem.mask, problem.q_layout.pieces.of(*members), problem.kv_layout.pieces.of(*owners))


def _incoming_rows(
    problem: Problem,
    pieces: CrossingPieces,
    tiles: Tiles,
    node_tiles: Tiles,
    near: Sequence[int],
    forwarded_to_us: Sequence[int],
) -> IncomingRows:
    """Return all rows that this rank receives: those it sees, and those that its node sees of the owners for which it
    forwards. Rows of this node are not split into pieces."""
    owner = np.concatenate([tiles.k_rank, node_tiles.k_rank])
    bands = np.concatenate([tiles.bands, node_tiles.bands])
    owner, start, stop = union(owner, bands[:, K0], bands[:, K1])
    is_near, found = np.isin(owner, near), []
    for layout, chosen in ((problem.kv_layout, is_near), (pieces.layout, ~is_near & (owner != problem.rank))):
        rows = RowRanges(*(x[chosen] for x in (owner, np.full_like(owner, problem.rank), start, stop)))
        arriving, token, step = split_at_spans(layout, rows)
        found.append((*arriving, token, step))
    owner, receiver, start, stop, token, step = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.lexsort((start, owner))
    arriving = RowRanges(owner[order], receiver[order], start[order], stop[order])
    stage = pieces.of(arriving.owner, arriving.start)
    if pieces.number == 1:
        stage = stage + np.isin(arriving.owner, forwarded_to_us)
    stage = np.where(np.isin(arriving.owner, near), _Stages(pieces.number).near, stage)
    return assign_slot_rows(arriving, token[order], step[order], stage)


def _own_rows(problem: Problem, split: Problem, nodes: Nodes, pieces: CrossingPieces) -> dict[int, list[Rows]]:
    """Return the messages with this rank's own keys, by ``peer * pieces + piece``: to each peer on its node the rows
    that it sees, as piece 0, and to each forwarding rank the rows that any rank of its node sees."""
    tiles = split.seeing()
    rank, node = problem.rank, nodes.of(problem.rank)
    receiver = np.array([q if nodes.of(q) == node else nodes.forwarder(rank, nodes.of(q)) for q in range(problem.world)])
    by, start, stop = union(receiver[tiles.q_rank], tiles.bands[:, K0], tiles.bands[:, K1])
    is_near, messages = by // nodes.per_node == node, {}
    for layout, chosen, crosses in ((problem.kv_layout, is_near & (by != rank), 0), (pieces.layout, ~is_near, 1)):
        rows = RowRanges(*(x[chosen] for x in (np.full_like(by, rank), by, start, stop)))
        leaving, _, _ = split_at_spans(layout, rows)
        piece = crosses * pieces.of(leaving.owner, leaving.start)
        messages.update(by_peer(leaving.receiver * pieces.number + piece, leaving.start, leaving.stop))
    return messages


def _forwarded_rows(problem: Problem, node_tiles: Tiles, placed: IncomingRows, pieces: CrossingPieces) -> dict[int, list[Rows]]:
    """Return the messages that forward rows, as rows of the slot that holds them, by ``(peer * world + owner) * pieces
    + piece``."""
    pair, start, stop = union(
        node_tiles.q_rank * problem.world + node_tiles.k_rank, node_tiles.bands[:, K0], node_tiles.bands[:, K1]
    )
    by, of = np.divmod(pair, problem.world)
    rows, _, _ = split_at_spans(problem.kv_layout, RowRanges(of, by, start, stop))
    hit = placed.find(rows.owner, rows.start)
    at = rows.start + (placed.slot_row - placed.start)[hit]
    key = (rows.receiver * problem.world + rows.owner) * pieces.number + pieces.of(rows.owner, rows.start)
    return by_peer(key, at, at + rows.stop - rows.start)
