"""Nodes hold whole documents as far as possible, and documents that are too large for a node are on few nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.layouts import Layout, balance, balanced
from ringspan.layouts.balanced import _documents
from ringspan.layouts.balanced.whole_documents import assign_whole, long_chunks


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


def test_a_long_document_is_on_few_nodes() -> None:
    """It has the work of 5.2 nodes. There are light documents for the other tokens of its nodes."""
    lengths = [20000, *[4000] * 50, *[200] * 1000]
    mask = rs.documents(lengths)
    layout = balanced(mask, 64, per_node=4)
    assert 20000 * 20001 / 2 / mask.area * 16 == pytest.approx(5.16, abs=0.01)
    assert max(layout.counts) - min(layout.counts) <= 1
    assert balance(mask, layout) <= 1.02
    assert nodes_of_documents(layout, lengths, 4)[0] <= 7


def test_chunks_have_the_work_of_a_node_with_light_documents() -> None:
    mask = rs.documents([30000, *[1000] * 98])
    ring = _documents(mask, 128)
    tokens, work = 16000, mask.area // 8
    chunks = long_chunks(ring, tokens, work, 128, 7)
    assert chunks
    assert chunks[0].stop == 30000
    assert [chunk.stop for chunk in chunks[1:]] == [chunk.start for chunk in chunks[:-1]]  # from the end
    for chunk in chunks:
        pairs = (chunk.stop * (chunk.stop + 1) - chunk.start * (chunk.start + 1)) // 2
        light = (tokens - (chunk.stop - chunk.start)) * 500.5
        assert work - 128 * 30000 <= pairs + light <= work  # to within a block
        assert chunk.start % 128 == 0
    assert len(long_chunks(ring, tokens, work, 128, 2)) == 2
    assert not long_chunks(_documents(rs.causal(30000), 128), 4000, rs.causal(30000).area // 8, 128, 7)


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
