"""Documents that are too large for a node are on few nodes, which send about as many rows as they receive."""

from __future__ import annotations

import numpy as np
import pytest

import ringspan as rs
from ringspan.layouts import Layout, balance, balanced
from ringspan.layouts.balanced import _documents, long_documents
from ringspan.layouts.balanced.long_documents import long_parts
from tests.layouts.balanced.test_whole_documents import nodes_of_documents

PER_NODE = 4


def rows_sent(layout: Layout, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many rows of the first document, which is causal, each node sends to others, and receives."""
    nodes = layout.world // PER_NODE
    owner = np.full(length, -1)
    for rank in range(layout.world):
        tokens = layout.positions(rank)
        owner[tokens[tokens < length]] = rank // PER_NODE
    last = np.array([np.flatnonzero(owner == node).max(initial=-1) for node in range(nodes)])
    sees = (last[:, None] > np.arange(length)) & (owner != np.arange(nodes)[:, None])
    return np.bincount(owner, weights=sees.sum(axis=0), minlength=nodes), sees.sum(axis=1)


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
    held, left = long_parts(ring, tokens, work, 128, 7, 0)
    chunks = [chunk for (chunk,) in held]
    assert chunks
    assert chunks[0][1] == 30000
    assert [stop for _, stop in chunks[1:]] == [start for start, _ in chunks[:-1]]  # from the end
    assert list(left.values()) == [chunks[-1][0]]
    for start, stop in chunks:
        pairs = (stop * (stop + 1) - start * (start + 1)) // 2
        light = (tokens - (stop - start)) * 500.5
        assert work - 128 * 30000 <= pairs + light <= work  # to within a block
        assert start % 128 == 0
    assert len(long_parts(ring, tokens, work, 128, 2, 2).held) == 2
    assert not long_parts(_documents(rs.causal(30000), 128), 4000, rs.causal(30000).area // 8, 128, 7, 8).held


LENGTHS = [40000, *[9000] * 12, *[300] * 900]  # the first one has the work of 10 of 16 nodes


def test_all_nodes_of_a_long_document_send_about_as_much_as_they_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = rs.documents(LENGTHS)
    layout = balanced(mask, 64, per_node=PER_NODE)
    assert max(layout.counts) - min(layout.counts) <= 1
    assert balance(mask, layout) <= 1.02
    sent, received = rows_sent(layout, LENGTHS[0])
    assert sent.sum() == received.sum()
    assert sent.max() <= 1.1 * received.max()
    monkeypatch.setattr(long_documents, "_deal", lambda *_: [])
    in_chunks, received_in_chunks = rows_sent(balanced(mask, 64, per_node=PER_NODE), LENGTHS[0])
    assert in_chunks.max() > 1.9 * sent.max()
    assert received.sum() <= 1.3 * received_in_chunks.sum()  # more rows cross in all


@pytest.mark.parametrize(
    "lengths", [[50000, *[2000] * 225], [20000, *[2000] * 50], [60000, *[250, 750, 1250] * 160]], ids=lambda x: str(x[0])
)
def test_a_document_that_needs_all_nodes_is_dealt_to_all_of_them(lengths: list[int]) -> None:
    """All other documents are light, so it has all the work that a node has beyond them."""
    mask = rs.documents(lengths)
    layout = balanced(mask, 32, per_node=PER_NODE)
    assert nodes_of_documents(layout, lengths, PER_NODE)[0] == 8
    assert max(layout.counts) - min(layout.counts) <= 1
    assert balance(mask, layout) <= 1.02
    sent, received = rows_sent(layout, lengths[0])
    assert sent.max() <= 1.1 * received.max()


def test_a_document_that_needs_a_node_with_fewer_ranks_is_not_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = rs.documents([50000, *[2000] * 225])
    layout = balanced(mask, 30, per_node=PER_NODE)
    assert max(layout.counts) - min(layout.counts) <= 1
    assert balance(mask, layout) <= 1.02
    monkeypatch.setattr(long_documents, "_deal", lambda *_: [])
    assert balanced(mask, 30, per_node=PER_NODE).digest == layout.digest


def test_every_token_of_a_dealt_document_is_on_one_node() -> None:
    ring = _documents(rs.documents(LENGTHS), 128)
    tokens, work = sum(LENGTHS) // 16, rs.documents(LENGTHS).area // 16
    held, left = long_parts(ring, tokens, work, 128, 15, 16)
    assert list(left.values()) == [0]
    assert len(held) > 8
    spans = sorted(span for of_node in held for span in of_node)
    assert [spans[0][0], *(stop for _, stop in spans)] == [*(start for start, _ in spans), 40000]
    pairs = [sum(stop * (stop + 1) - start * (start + 1) for start, stop in of_node) // 2 for of_node in held]
    counts = [sum(stop - start for start, stop in of_node) for of_node in held]
    assert max(counts) <= tokens
    assert max(pairs) <= work
    assert max(pairs) - min(pairs) <= 0.15 * work  # the rest are light documents


def test_windows_are_not_dealt() -> None:
    """Each chunk needs the rows of a window before it, and no node sends more than that."""
    mask = rs.documents(LENGTHS) & rs.window(2047, 0)
    held, _ = long_parts(_documents(mask, 128), sum(LENGTHS) // 16, mask.area // 16, 128, 15, 16)
    assert all(len(of_node) == 1 for of_node in held)
