"""Documents that several nodes have are shared evenly among the ranks of each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.layouts import balance, balanced
from ringspan.layouts.balanced.dealing import FEWEST_DEALT, deal
from ringspan.strategies.crossing_pieces import _crossing_rows
from ringspan.strategies.nodes import Nodes


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 24000), max_size=6),
    ranks=st.integers(1, 5),
)
def test_every_token_once_and_even_counts(lengths: list[int], cuts: list[int], ranks: int) -> None:
    documents = np.concatenate([[0], np.cumsum(lengths)])
    total = int(documents[-1])
    edges = sorted({0, total, *(c for c in cuts if c < total)})
    pieces = [*pairwise(edges)][::2]  # every other one is on another node
    start, stop = (np.array(x, dtype=np.int64) for x in zip(*pieces, strict=True))
    held, left_start, left_stop = deal(documents, start, stop, ranks)
    left = zip(left_start.tolist(), left_stop.tolist(), strict=True)
    spans = [*(span for of_rank in held for span in of_rank), *left]
    tokens = [t for span in spans for t in range(*span)]
    assert sorted(tokens) == [t for piece in pieces for t in range(*piece)]
    counts = [sum(b - a for a, b in of_rank) for of_rank in held]
    assert max(counts) - min(counts) <= 1
    whole = {d for d, (a, b) in enumerate(pairwise(documents.tolist())) if any(p[0] <= a and b <= p[1] for p in pieces)}
    for of_rank in held:  # documents that no other node has are left
        assert not whole & {int(documents.searchsorted(a, side="right")) - 1 for a, b in of_rank if a < b}


def test_ranks_of_a_node_send_equally_many_keys_to_other_nodes() -> None:
    mask = rs.documents([60000, *[700] * 60, *[5000] * 6])
    layout = balanced(mask, 16, per_node=4)
    assert balance(mask, layout) <= 1.02
    owner, start, stop = _crossing_rows(mask, layout, layout, Nodes(16, 4))
    rows = np.bincount(owner, weights=stop - start, minlength=16).reshape(4, 4)
    assert rows.sum() > 30000
    # Parts of documents below FEWEST_DEALT tokens per rank are not shared.
    assert (rows.max(axis=1) - rows.min(axis=1) <= 4 * FEWEST_DEALT).all()
