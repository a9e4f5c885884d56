"""The number of ranks and the rows of one rank, which follow from two layouts and the rank."""

from __future__ import annotations

from ringspan.layouts import Layout


class LocalRows:
    """Properties of a class that has the fields ``q_layout``, ``kv_layout`` and ``rank``."""

    __slots__ = ()

    q_layout: Layout
    kv_layout: Layout
    rank: int

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.q_layout.world

    @property
    def q_rows(self) -> int:
        """How many queries this rank owns."""
        return self.q_layout.counts[self.rank]

    @property
    def kv_rows(self) -> int:
        """How many keys this rank owns."""
        return self.kv_layout.counts[self.rank]
