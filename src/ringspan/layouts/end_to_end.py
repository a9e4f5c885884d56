"""Layouts of several sequences laid end to end as one."""

from __future__ import annotations

from collections.abc import Sequence

from ringspan.layouts.layout import Layout


def end_to_end(layouts: Sequence[Layout], name: str) -> Layout:
    """Return the layout in which each rank has its tokens of all sequences, those of the first sequence first.

    >>> print(end_to_end([Layout([[(0, 1)], [(1, 2)]]), Layout([[(2, 3)], [(0, 2)]])], "both").ascii())
    rank 0: [0,1) [4,5)
    rank 1: [1,2) [2,4)
    """
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(layouts[0].world)]
    offset = 0
    for layout in layouts:
        for rank, of_rank in enumerate(layout.spans):
            spans[rank] += [(s.start + offset, s.stop + offset, s.step) for s in of_rank]
        offset += layout.length
    return Layout(spans, length=offset, name=name)
