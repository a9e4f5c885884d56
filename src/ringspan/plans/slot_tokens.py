"""Which global tokens the rows of a slot hold, and which heads.

Kernels compute on rows of slots. A user's function (``score_mod``, ``mask_mod``) takes global indices, so every task
records which tokens its slots hold when it runs::

    ring, 3 ranks of 2 tokens: key slots of rank 0, while it computes step …
      0   slot 0: tokens 0 1        its own; not recorded, since they follow from the layout
      1   slot 1: tokens 4 5        from rank 2
      2   slot 2: tokens 2 3        from rank 1, forwarded by rank 2

``ringspan.plans.verify`` checks that the transfers of all ranks deliver exactly these tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ringspan.caching.by_digest import cache_by_digest
from ringspan.layouts import Layout

Ints = NDArray[np.int64]

# The columns of a span.
START, STOP, STEP = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class SlotTokens:
    """The tokens of a slot's first rows as spans (start, stop, step), in the order of the rows, and the first of its
    heads.

    >>> tokens = SlotTokens(np.array([[4, 6, 1], [1, 8, 3]]))
    >>> tokens.count, tokens.expand(7).tolist()
    (5, [4, 5, 1, 4, 7, 0, 0])
    """

    spans: Ints
    first_head: int = 0

    def __post_init__(self) -> None:
        self.spans.setflags(write=False)

    @property
    def sizes(self) -> Ints:
        start, stop, step = self.spans.T
        return -(-(stop - start) // step)

    @property
    def count(self) -> int:
        """The number of rows that are described."""
        return int(self.sizes.sum())

    def expand(self, rows: int) -> Ints:
        """Return the token of each row, and 0 for further rows of the slot, up to ``rows``."""
        sizes, (start, _, step) = self.sizes, self.spans.T
        count = int(sizes.sum())
        index = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tokens = np.zeros(max(rows, count), dtype=np.int64)
        tokens[:count] = np.repeat(start, sizes) + index * np.repeat(step, sizes)
        return tokens

    def for_heads(self, first_head: int) -> SlotTokens:
        return SlotTokens(self.spans, first_head)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SlotTokens):
            return NotImplemented
        return self is other or (self.first_head == other.first_head and np.array_equal(self.spans, other.spans))

    def __hash__(self) -> int:  # of the first and the last span, so that a look-up does not read all spans
        return hash((self.first_head, len(self.spans), self.spans[:1].tobytes(), self.spans[-1:].tobytes()))


@cache_by_digest(64)
def own_tokens(layout: Layout) -> tuple[SlotTokens, ...]:
    """Return the tokens in slot 0 of each rank: its own."""
    spans = np.array([span for of_rank in layout.spans for span in of_rank], dtype=np.int64).reshape(-1, 3)
    ends = [0, *accumulate(map(len, layout.spans))]
    return tuple(SlotTokens(spans[first:last]) for first, last in pairwise(ends))
