"""Nodes: their ranks, and the tokens of a node in order."""

from __future__ import annotations

import numpy as np
import pytest

import ringspan as rs
from ringspan.layouts import LAYOUTS
from ringspan.strategies.nodes import Nodes, by_node, sorted_pieces

SIZES = [(1, 1), (2, 1), (2, 2), (5, 2), (6, 3), (7, 3), (8, 8), (8, 5)]


@pytest.mark.parametrize(("world", "per_node"), SIZES)
def test_every_rank_is_on_one_node(world: int, per_node: int) -> None:
    nodes = Nodes(world, per_node)
    assert [rank for node in range(nodes.count) for rank in nodes.ranks(node)] == list(range(world))
    assert all(rank in nodes.ranks(nodes.of(rank)) for rank in range(world))
    assert all(len(nodes.ranks(node)) == per_node for node in range(nodes.count - 1))


@pytest.mark.parametrize(("world", "per_node"), SIZES)
def test_forwarding_ranks_share_the_work(world: int, per_node: int) -> None:
    nodes = Nodes(world, per_node)
    for node in range(nodes.count):
        assert all(nodes.forwarder(rank, node) == rank for rank in nodes.ranks(node))
        for other in range(nodes.count):
            load = np.bincount([nodes.forwarder(rank, node) - nodes.ranks(node).start for rank in nodes.ranks(other)])
            assert max(load) == -(-len(nodes.ranks(other)) // len(nodes.ranks(node)))


@pytest.mark.parametrize(("world", "per_node"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_node_owns_the_tokens_of_its_ranks(layout: str, world: int, per_node: int) -> None:
    nodes = Nodes(world, per_node)
    of_ranks = LAYOUTS[layout](rs.documents([7, 1, 13, 9]), world)
    of_nodes = by_node(of_ranks, nodes)
    for node in range(nodes.count):
        tokens = of_nodes.positions(node)
        pieces = sorted_pieces(of_ranks, nodes.ranks(node))
        for rank in nodes.ranks(node):
            p = pieces.of(rank)
            rows = np.concatenate([np.arange(0), *(np.arange(at, at + n) for at, n in zip(p.at, p.size, strict=True))])
            assert tokens[rows].tolist() == of_ranks.positions(rank).tolist()


def test_contiguous_spans_of_a_node_are_joined() -> None:
    of_nodes = by_node(LAYOUTS["zigzag"](rs.causal(32), 4), Nodes(4, 2))
    assert [[tuple(span) for span in of_node] for of_node in of_nodes.spans] == [[(0, 8, 1), (24, 32, 1)], [(8, 24, 1)]]
    striped = by_node(LAYOUTS["striped"](rs.causal(8), 4), Nodes(4, 2))
    assert sorted(striped.positions(0).tolist()) == [0, 1, 4, 5]


def test_tokens_of_a_node_are_in_the_order_of_the_sequence() -> None:
    """All of a zigzag on one node is the sequence itself, and causal attention one band."""
    plan = rs.plan(rs.causal(64), world=4, strategy="ulysses", layout="zigzag")
    assert [len(task.bands) for step in plan.program.forward for task in step.tasks] == [1]
