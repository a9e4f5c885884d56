"""Exchange heads for tokens: within a node, every rank gets all tokens of the node for some of the heads.

::

    step 0          q and kv: each rank sends to each rank of its node the heads that this rank computes
    steps 1 … n     a program between nodes, run by the ranks that have the same heads
    step n + 1      out (backward: dq and dkv) is sent to the tokens' owners, complete

Backward, a rank still has the queries and keys of the node, with out and lse, and step 0 sends dout only. They take the
place of its own rows, which are not saved. What the program between nodes has fetched is not kept: it is fetched again.

A gradient of a key head that several ranks compute with is not complete: its owner adds their parts.

With one node the program in the middle is one task. Each run of a rank's heads (see ``heads.py``) has its own slots. A
rank copies its own heads of its own tokens by a transfer to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.costs.plan_cost import copying_seconds, tensors_of
from ringspan.costs.timeline import Loads, communication_seconds, without_messages
from ringspan.costs.workload import Workload
from ringspan.errors import PlanError
from ringspan.layouts import Layout, Pieces
from ringspan.masks import Mask
from ringspan.plans.data import OVERWRITES, PHASES, PayloadKind, Phase, Program, Side, Slot, Step, Transfer, side
from ringspan.plans.problem import Problem, Rows
from ringspan.plans.slot_tokens import SlotTokens, own_tokens
from ringspan.strategies.heads import Run, share_heads, split_key_heads
from ringspan.strategies.incoming_rows import ranges_by_peer
from ringspan.strategies.nodes import Nodes, by_node, sorted_pieces

RESULTS: dict[Phase, tuple[PayloadKind, ...]] = {"forward": ("out",), "backward": ("dq", "dkv")}


def split_heads(
    problem: Problem, nodes: Nodes, heads: int, kv_heads: int, *, keep: bool, between: Callable[[Problem], Program]
) -> Program:
    """Return the program of a rank on nodes of equal size. ``between`` makes the program for a world whose ranks are
    the nodes; it must not send queries. ``keep``: whether the rows of the node are kept for the backward pass."""
    if nodes.per_node == 1:
        return between(problem)
    node = nodes.of(problem.rank)
    members = nodes.ranks(node)
    place = problem.rank - members.start
    shares, split = share_heads(heads, kv_heads, nodes.per_node), split_key_heads(heads, kv_heads, nodes.per_node)
    runs = shares[place]
    middle, node_tokens = _middle(problem.mask, problem.q_layout, problem.kv_layout, nodes, node, between)
    here = {"q": problem.q_layout.pieces.of(problem.rank), "kv": problem.kv_layout.pieces.of(problem.rank)}
    there = {"q": sorted_pieces(problem.q_layout, members), "kv": sorted_pieces(problem.kv_layout, members)}

    def transfer(what: PayloadKind, peer: int, slot: int, rows: Rows, run: Run) -> Transfer:
        complete = what not in OVERWRITES and (what != "dkv" or split.isdisjoint(range(*run.kv)))
        return Transfer(
            what=what, peer=peer, slot=slot, rows=rows, heads=None if slot else run.of(side(what)), complete=complete
        )

    def own(what: PayloadKind) -> list[Transfer]:
        """Return the transfers of the rank's own tokens: to each rank of the node the heads that it computes."""
        messages = _messages(here[side(what)]).get(problem.rank, ())
        of_ranks = zip(members, shares, strict=True)
        return [transfer(what, peer, 0, rows, run) for peer, theirs in of_ranks for run in theirs for rows in messages]

    def of_node(what: PayloadKind) -> list[Transfer]:
        """Return the transfers of all tokens of the node: the heads that this rank computes."""
        messages = _messages(there[side(what)])
        return [
            transfer(what, peer, _slot(middle, side(what), n, 0), rows, run)
            for peer in members
            for n, run in enumerate(runs)
            for rows in messages.get(peer, ())
        ]

    def steps(phase: Phase) -> tuple[Step, ...]:
        inputs, results = _inputs(phase, keep), RESULTS[phase]
        return (
            Step(sends=tuple(t for x in inputs for t in own(x)), recvs=tuple(t for x in inputs for t in of_node(x))),
            *(
                _for_each_run(step, middle, node_tokens, runs, lambda node: nodes.ranks(node)[place])
                for step in middle.steps(phase)
            ),
            Step(sends=tuple(t for x in results for t in of_node(x)), recvs=tuple(t for x in results for t in own(x))),
        )

    return Program(
        forward=steps("forward"),
        backward=steps("backward"),
        q_slots=(Slot(rows=problem.q_rows), *(slot for run in runs for slot in _for_heads(middle.q_slots, run.q, keep))),
        kv_slots=(Slot(rows=problem.kv_rows), *(slot for run in runs for slot in _for_heads(middle.kv_slots, run.kv, keep))),
        heads=(heads, kv_heads),
    )


def _inputs(phase: Phase, keep: bool) -> tuple[PayloadKind, ...]:
    return ("dout",) if phase == "backward" and keep else ("q", "kv")


def _for_heads(slots: tuple[Slot, ...], heads: tuple[int, int], keep: bool) -> Iterator[Slot]:
    """Yield the slots of the program between nodes for some heads. Slot 0 of it has the rows of the node."""
    for n, slot in enumerate(slots):
        yield Slot(rows=slot.rows, heads=heads[1] - heads[0], kept=keep and n == 0)


@cache_by_digest(64)
def _middle(
    mask: Mask, q_layout: Layout, kv_layout: Layout, nodes: Nodes, node: int, between: Callable[[Problem], Program]
) -> tuple[Program, dict[Side, SlotTokens]]:
    """Return the program between nodes, and the tokens of the node. They are the same for all ranks of the node."""
    queries, keys = by_node(q_layout, nodes), by_node(kv_layout, nodes)
    program = between(Problem(mask=mask, q_layout=queries, kv_layout=keys, rank=node))
    return program, {"q": own_tokens(queries)[node], "kv": own_tokens(keys)[node]}


def _for_each_run(
    step: Step, middle: Program, node_tokens: dict[Side, SlotTokens], runs: tuple[Run, ...], rank_on: Callable[[int], int]
) -> Step:
    """Return a step between nodes, once for each run of heads, with the ranks that have the same heads on the other
    nodes."""

    def moved(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
        return tuple(
            replace(t, peer=rank_on(t.peer), slot=_slot(middle, side(t.what), run, t.slot))
            for run in range(len(runs))
            for t in transfers
        )

    tasks = (
        replace(
            task,
            q_slot=_slot(middle, "q", n, task.q_slot),
            kv_slot=_slot(middle, "kv", n, task.kv_slot),
            q_tokens=(task.q_tokens or node_tokens["q"]).for_heads(run.q[0]),
            kv_tokens=(task.kv_tokens or node_tokens["kv"]).for_heads(run.kv[0]),
        )
        for n, run in enumerate(runs)
        for task in step.tasks
    )
    return Step(sends=moved(step.sends), recvs=moved(step.recvs), tasks=tuple(tasks))


def _slot(middle: Program, of: Side, run: int, slot: int) -> int:
    """Return the index of the middle program's slot for a run of heads: after slot 0, run by run."""
    return 1 + run * len(middle.q_slots if of == "q" else middle.kv_slots) + slot


def _messages(p: Pieces) -> dict[int, list[Rows]]:
    """Return one message to each peer. Some heads of a row are never contiguous with those of the next row, so all are
    packed."""
    return {peer: [rows] for peer, rows in ranges_by_peer(p.owner, p.at, p.at + p.size).items()}


def check_keep(given: object) -> None:
    if not isinstance(given, bool):
        raise PlanError(f"keep must be True or False; got {given!r}")


def head_split_loads(workload: Workload, per_node: int, whole: dict[Phase, float], *, keep: bool) -> dict[Phase, Loads]:
    """Return a lower bound: send queries or dout, compute, send results back. ``whole`` is the compute time of all heads
    of the busiest node.

    No rank computes more query heads than ⌈heads / ranks⌉, so it sends all others of its own tokens away, and those
    that do not fit on its node to other nodes, in one copy for each rank that computes as many. Keys are not counted.
    """
    shape, machine = workload.shape, workload.machine
    heads_here = -(-shape.heads // per_node)
    far = max(0, shape.heads - heads_here * min(per_node, machine.per_node))
    rows = max(workload.q_layout.counts[rank] for rank in workload.ranks)
    share = heads_here / shape.heads if shape.heads else 0.0
    away = -(-(far or shape.heads - heads_here) // heads_here) if heads_here and rows else 0
    found: dict[Phase, Loads] = {}
    for phase in PHASES:
        heads_away = far or shape.heads - heads_here
        moved = np.zeros((2, 1, 3))
        moved[1 if far else 0, 0, [0, 2]] = (
            rows * shape.row_bytes(_inputs(phase, keep)[0], phase, heads_away),
            rows * shape.message_row_bytes(RESULTS[phase][0], phase, heads_away, complete=True),
        )
        copies = away * np.array([[1, 0, tensors_of(RESULTS[phase][0])]])
        found[phase] = without_messages(np.array([[0.0, whole[phase] * share, 0.0]]))._replace(
            communication=communication_seconds(moved, moved, machine),
            copying=copying_seconds(moved.sum(axis=0), copies, machine),
        )
    return found
