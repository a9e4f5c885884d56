"""The order of the documents of a rank, which are the sequences of its kernel launches.

::

    the sequence, causal            a a a a b b b b b b c c c c c c d e e e e e
    tokens of rank 1                a a a a         b b c c c c c c d
    in the order of its rows        b b c c c c c c a a a a d

Queries that see keys of other ranks come first, here those of b. A second launch computes them with received keys, and
its passes over rows, and the merges of its results, include all rows between them. Before them come the documents that
other nodes have, too. Then come long documents, the longest first: a launch ends when its last sequence does. All others
keep the order of the sequence, so that there are few spans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringspan.layouts.layout import Ints
from ringspan.masks import table as tables

Spans = list[tuple[int, int]]

# A document is long if it has at least one of so many parts of a rank's tokens.
LONG_PART = 8


def in_launch_order(of_ranks: Sequence[Spans], cuts: Ints, *, per_node: int, is_causal: bool) -> list[Spans]:
    """Return the spans of each rank in the order described above. They are given in the order of the sequence, adjacent
    ones joined. ``cuts`` are the bounds of the documents.

    >>> cuts = np.array([0, 4, 10, 16, 17, 22])
    >>> in_launch_order([[(4, 8), (17, 22)], [(0, 4), (8, 17)]], cuts, per_node=2, is_causal=True)
    [[(17, 22), (4, 8)], [(8, 16), (0, 4), (16, 17)]]
    """
    rank = np.repeat(np.arange(len(of_ranks)), list(map(len, of_ranks)))
    low, high = np.array([span for spans in of_ranks for span in spans], dtype=np.int64).reshape(-1, 2).T
    i, document = tables.overlapping(low, high, cuts[:-1], cuts[1:])
    rank, low, high = rank[i], np.maximum(low[i], cuts[document]), np.minimum(high[i], cuts[document + 1])

    def of_group(group: Ints, values: Ints) -> Ints:
        """Return the sum of the values of each part's group."""
        _, index = np.unique(group, return_inverse=True)
        total = np.zeros(len(group), dtype=np.int64)
        np.add.at(total, index, values)
        return total[index]

    size, rows = np.diff(cuts)[document], high - low
    on_rank = of_group(rank * len(cuts) + document, rows)
    on_node = of_group(rank // per_node * len(cuts) + document, rows)
    continues = of_group(rank * len(cuts) + document, (low > cuts[document]).astype(np.int64))
    waits = (on_rank < size) & (not is_causal or continues > 0)
    is_long = on_rank * LONG_PART >= of_group(rank, rows)
    kind = np.where(on_node < size, 0, np.where(waits, 1, 2))
    order = np.lexsort((low, document, -on_rank * is_long, kind, rank))
    ordered: list[Spans] = [[] for _ in of_ranks]
    for r, a, b in zip(*(column[order].tolist() for column in (rank, low, high)), strict=True):
        spans = ordered[r]
        joins = bool(spans) and spans[-1][1] == a
        spans.append((spans.pop()[0] if joins else a, b))
    return ordered
