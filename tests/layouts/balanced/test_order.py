"""The order of documents on a rank, against a sort by what each document is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.layouts import balanced
from ringspan.layouts.balanced.order import LONG_PART, in_launch_order
from ringspan.plans.problem import whole_tiles


def parts_of(spans: list[tuple[int, int]], cuts: list[int]) -> list[tuple[int, int, int]]:
    """The spans, cut where a document ends: (document, first token, end)."""
    return [
        (d, max(a, low), min(b, high)) for low, high in spans for d, (a, b) in enumerate(pairwise(cuts)) if a < high and low < b
    ]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    edges=st.lists(st.integers(0, 300), max_size=9),
    owners=st.lists(st.integers(0, 3), min_size=10, max_size=10),
    per_node=st.sampled_from([2, 4]),
    is_causal=st.booleans(),
)
def test_documents_are_sorted_by_what_they_are(
    lengths: list[int], edges: list[int], owners: list[int], per_node: int, is_causal: bool
) -> None:
    cuts = [0, *np.cumsum(lengths).tolist()]
    pieces = [*pairwise(sorted({0, cuts[-1], *(e for e in edges if e < cuts[-1])}))]
    of_ranks: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    for (low, high), owner in zip(pieces, owners, strict=False):
        joins = of_ranks[owner] and of_ranks[owner][-1][1] == low
        of_ranks[owner].append((of_ranks[owner].pop()[0] if joins else low, high))
    here = [{t for span in spans for t in range(*span)} for spans in of_ranks]
    for rank, spans in enumerate(in_launch_order(of_ranks, np.array(cuts), per_node=per_node, is_causal=is_causal)):
        assert {t for span in spans for t in range(*span)} == here[rank]
        assert all(before != after for (_, before), (after, _) in pairwise(spans))  # joined
        node = set().union(*(here[r] for r in range(4) if r // per_node == rank // per_node))

        def kind(part: tuple[int, int, int], rank: int = rank, node: set[int] = node) -> tuple[int, int, int, int]:
            document = {*range(cuts[part[0]], cuts[part[0] + 1])}
            mine = document & here[rank]
            waits = mine != document and (not is_causal or any(t - 1 in document - here[rank] for t in mine))
            is_long = len(mine) * LONG_PART >= len(here[rank])
            first = 0 if not document <= node else 1 if waits else 2
            return first, -len(mine) * is_long, part[0], part[1]

        parts = parts_of(spans, cuts)
        assert parts == sorted(parts, key=kind)


def test_only_rows_of_their_documents_are_between_queries_that_see_keys_of_other_ranks() -> None:
    lengths = [60, 50, 40, 90, 70, 30, 80]
    document = np.repeat(np.arange(len(lengths)), lengths)
    for mask in (rs.documents(lengths), rs.documents(lengths, causal=False)):
        layout = balanced(mask, 4)
        tiles = whole_tiles(mask, layout, layout)
        away = tiles.q_rank != tiles.k_rank
        ranks = set(tiles.q_rank[away].tolist())
        assert len(ranks) >= 2
        for rank in ranks:
            bands = tiles.bands[away & (tiles.q_rank == rank)]
            tokens = layout.positions(rank)
            waiting = {d for q0, q1 in bands[:, :2] for d in document[tokens[q0:q1]]}
            assert set(document[tokens[: bands[:, 1].max()]]) == waiting


def test_one_rank_has_the_sequence_in_its_order() -> None:
    """What a model computes from the tokens of one rank alone is right on one rank."""
    assert balanced(rs.documents([5, 3, 40, 7]), 1).spans == (((0, 55, 1),),)
