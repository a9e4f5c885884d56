"""Nodes hold whole documents as far as possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.layouts import Layout, balance, balanced
from ringspan.layouts.balanced.whole_documents import assign_whole


def nodes_of_documents(layout: Layout, lengths: list[int], per_node: int) -> list[int]:
    """Return on how many nodes each document is."""
    node = np.empty(sum(lengths), dtype=np.int64)
    for rank in range(layout.world):
        node[layout.positions(rank)] = rank // per_node
    return [len(np.unique(part)) for part in np.split(node, np.cumsum(lengths)[:-1])]


def test_documents_that_fit_into_a_node_are_on_one_node() -> None:
    lengths = np.random.default_rng(0).lognormal(8, 0.8, 400).astype(int).clip(64, 30000).tolist()
    layout = balanced(rs.documents(lengths), 32, per_node=4)
    assert max(layout.counts) - min(layout.counts) <= 1
    assert balance(rs.documents(lengths), layout) <= 1.02
    split = [n for n, nodes in zip(lengths, nodes_of_documents(layout, lengths, 4), strict=True) if nodes > 1]
    assert len(split) <= 8  # at most one for each node,
    assert max(split, default=0) < np.median(lengths)  # and short ones


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60), nodes=st.integers(1, 6))
def test_no_node_gets_more_than_its_limits(lengths: list[int], nodes: int) -> None:
    size = np.array(sorted(lengths), dtype=np.int64)
    work = size * (size + 1) // 2
    tokens, fair = -(-int(size.sum()) // nodes), int(work.sum()) // nodes
    node = assign_whole(size, work, [tokens] * nodes, [fair] * nodes, [fair + fair // 80] * nodes)
    for i in range(nodes):
        assert size[node == i].sum() <= tokens
        assert work[node == i].sum() <= fair + fair // 80
    assert (node[: int((size.cumsum() < size.sum() // 20).sum())] == -1).all()  # the lightest ones are left


@pytest.mark.parametrize(
    ("world", "per_node", "slack"), [(16, 6, 0), (33, 8, 0), (18, 4, 0), (30, 19, 3), (6, 1, 100), (6, 4, 7)]
)
def test_every_rank_gets_its_tokens_if_they_cannot_be_shared_equally(world: int, per_node: int, slack: int) -> None:
    """A node that holds a few tokens more than its minimum leaves enough for the others."""
    for seed in range(20):
        lengths = np.random.default_rng(seed).lognormal(4, 1.0, 60).astype(int).clip(1).tolist()
        layout = balanced(rs.documents(lengths), world, per_node=per_node, slack=slack)
        assert max(layout.counts) <= -(-sum(lengths) // world) + slack
        assert min(layout.counts) >= sum(lengths) // world - slack
