"""The programs of all ranks as columns, for ``hierarchical.py`` with one piece."""

from __future__ import annotations

import numpy as np

from ringspan.costs.workload import Workload
from ringspan.layouts import Tiles
from ringspan.masks.table import K0, K1
from ringspan.plans.columns import Messages, ProgramColumns
from ringspan.plans.moving_side import KEYS, RowRanges
from ringspan.plans.problem import union, whole_tiles
from ringspan.strategies.arrivals import Arrivals, needed_ranges
from ringspan.strategies.nodes import Nodes

# Stages of received rows: those that come from their owners, and those that were forwarded.
DIRECT, FORWARDED = 0, 1


def hierarchical_columns(workload: Workload, nodes: Nodes) -> ProgramColumns:
    """Return the columns of the programs that :class:`ringspan.strategies.hierarchical.Hierarchical` makes with one
    piece for several nodes of several ranks."""
    world = workload.world
    tiles = whole_tiles(workload.mask, workload.q_layout, workload.kv_layout)
    node, rank = np.arange(world) // nodes.per_node, np.arange(world)
    # The forwarding rank of each owner (column) on the node of each rank (row); an owner on the same node is its own.
    forwarder = np.array([[nodes.forwarder(owner, n) for owner in range(world)] for n in range(nodes.count)])[node]
    is_near = node[:, None] == node[None, :]
    stage_of = np.where(is_near | (forwarder == rank[:, None]), DIRECT, FORWARDED)
    of_ranks, of_nodes = needed_ranges(tiles, KEYS, world), _forwarded_ranges(tiles, nodes, forwarder)
    is_forwarded_here = forwarder[of_ranks.receiver, of_ranks.owner] == of_ranks.receiver
    kept = is_near[of_ranks.receiver, of_ranks.owner] | ~is_forwarded_here  # the others are part of those of the node
    rows = RowRanges(*(np.concatenate([a[kept], b]) for a, b in zip(of_ranks, of_nodes, strict=True)))
    arrivals = Arrivals.of(workload.kv_layout, rows, stage_of, 2)
    joined = arrivals.messages()
    near = is_near[joined.receiver, joined.owner]
    from_rank = np.where(joined.stage == DIRECT, joined.owner, forwarder[joined.receiver, joined.owner])
    inputs = joined.inputs("kv", joined.stage, sender=from_rank)
    returned_in = np.where(near, 2, np.where(joined.stage == FORWARDED, 3, 4))
    gradients = joined.results("dkv", returned_in, receiver=from_rank)
    messages: tuple[Messages, ...] = (inputs, gradients)
    of_queries, of_keys = (np.array(layout.counts) for layout in (workload.q_layout, workload.kv_layout))
    return ProgramColumns(
        world=world,
        steps={"forward": 3, "backward": 5},
        tasks=arrivals.tasks(workload, KEYS, np.array([1, 2])),
        messages={"forward": messages[:1], "backward": messages},
        q_slots=of_queries[:, None],
        kv_slots=np.column_stack([of_keys, arrivals.rows_by_stage(world)]),
        dkv_dtype=workload.dkv_dtype,
    )


def _forwarded_ranges(tiles: Tiles, nodes: Nodes, forwarder: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> RowRanges:
    """Return the rows of other nodes that any rank of a node sees, to be received by the forwarding rank."""
    crosses = tiles.q_rank // nodes.per_node != tiles.k_rank // nodes.per_node
    of, bands = tiles.k_rank[crosses], tiles.bands[crosses]
    by = forwarder[tiles.q_rank[crosses], of]
    pair, start, stop = union(by * nodes.world + of, bands[:, K0], bands[:, K1])
    receiver, owner = np.divmod(pair, nodes.world)
    return RowRanges(owner, receiver, start, stop)
