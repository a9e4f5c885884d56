"""Nodes of ``per_node`` ranks each. The links within a node are faster than those between nodes.

::

    8 ranks, per_node=3      node 0: ranks 0 1 2    node 1: ranks 3 4 5    node 2: ranks 6 7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspan.errors import PlanError
from ringspan.layouts import Layout, Pieces


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ranks grouped into nodes. The last node has fewer ranks if ``per_node`` does not divide the world."""

    world: int
    per_node: int

    @property
    def count(self) -> int:
        return -(-self.world // self.per_node)

    def of(self, rank: int) -> int:
        return rank // self.per_node

    def forwarder(self, rank: int, node: int) -> int:
        """Return the rank with the same index on that node, which forwards this rank's rows there. On a smaller node
        several ranks have the same forwarder."""
        there = self.ranks(node)
        return there[rank % self.per_node % len(there)]

    def ranks(self, node: int) -> range:
        return range(node * self.per_node, min(self.world, (node + 1) * self.per_node))


def sorted_pieces(layout: Layout, ranks: range) -> Pieces:
    """Return the spans of some ranks in the order of the sequence, so that bands which the layout has split join again.

    ``owner`` is the same rank as in the layout, and ``at`` is the row of a span in this order.
    """
    p = layout.pieces
    there = np.flatnonzero((p.owner >= ranks.start) & (p.owner < ranks.stop))
    order = there[np.argsort(p.start[there], kind="stable")]
    size = p.size[order]
    at = np.empty(len(p.at), dtype=np.int64)
    at[order] = np.cumsum(size) - size
    return Pieces(*(column[there] for column in p._replace(at=at)))


def by_node(layout: Layout, nodes: Nodes) -> Layout:
    """Return a layout whose ranks are the nodes. A node owns the tokens of its ranks, in the order of
    :func:`sorted_pieces`. Contiguous spans that follow each other are joined."""
    spans = []
    for node in range(nodes.count):
        p = sorted_pieces(layout, nodes.ranks(node))
        order = np.argsort(p.at)
        start, size, step = p.start[order], p.size[order], p.step[order]
        stop = start + (size - 1) * step + 1
        is_contiguous = (step == 1) | (size == 1)
        begins = np.ones(len(start), dtype=np.bool_)
        begins[1:] = ~(is_contiguous[1:] & is_contiguous[:-1] & (start[1:] == stop[:-1]))
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(start)) - 1 if len(start) else first
        step = np.where(first == last, step[first], 1)
        spans.append(np.stack([start[first], stop[last], step], axis=1).tolist())
    return Layout(spans, length=layout.length, name=layout.name)


def check_per_node(per_node: Any) -> None:
    if not isinstance(per_node, int) or per_node < 1:
        raise PlanError(f"per_node must be an integer number of ranks, at least 1; got {per_node!r}")
