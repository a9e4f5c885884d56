"""Ranks that exchange keys get neighbouring numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.layouts import Layout, contiguous
from ringspan.layouts.balanced.renumber import renumber_ranks
from ringspan.plans import needed_rows
from tests.hypothesis_strategies import Drawn, masks


def between_nodes(mask: rs.Mask, layout: Layout, per_node: int) -> int:
    rows = needed_rows(mask, layout, layout)
    node = np.arange(layout.world) // per_node
    return int(rows[node[:, None] != node[None, :]].sum())


def test_two_interleaved_documents_are_separated_into_two_nodes() -> None:
    """Ranks 0, 2, 4, 6 hold one document and 1, 3, 5, 7 the other: four of one, then four of the other."""
    mask = rs.documents([40, 40])
    dealt = [[(40 * (rank % 2) + 10 * (rank // 2), 40 * (rank % 2) + 10 * (rank // 2) + 10)] for rank in range(8)]
    before = Layout(dealt, length=80)
    after = renumber_ranks(mask, before)
    assert between_nodes(mask, before, 4) > 0
    assert between_nodes(mask, after, 4) == 0
    assert after.spans[0] == before.spans[0]


@given(drawn=masks(max_len=24).filter(lambda drawn: drawn.mask.lengths[0] == drawn.mask.lengths[1]), world=st.integers(1, 6))
def test_the_shares_are_the_same(drawn: Drawn, world: int) -> None:
    before = contiguous(drawn.mask, world)
    after = renumber_ranks(drawn.mask, before)
    assert sorted(map(str, after.spans)) == sorted(map(str, before.spans))
    assert renumber_ranks(drawn.mask, before).spans == after.spans
