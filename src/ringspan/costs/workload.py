"""The work of a mask with a layout on a machine, for each pair of ranks: compute time, and rows that are needed.

Strategies that move the same side share these numbers.

::

    causal(4) on 2 ranks, contiguous        computing    of rank 0   of rank 1        rows needed  of rank 0   of rank 1
                                            rank 0       3 pairs     –                rank 0       2           –
                                            rank 1       4 pairs     3 pairs          rank 1       2           2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.plan_cost import flops_per_pair, of_kind, passes_row_bytes
from ringspan.costs.timeline import Seconds
from ringspan.layouts import Layout, Tiles, cut
from ringspan.masks import Mask
from ringspan.masks.table import Table, area
from ringspan.plans.data import AS_ACCUMULATED, PHASES, DkvDtype, PayloadKind, Phase
from ringspan.plans.moving_side import KEYS, QUERIES, MovingSide
from ringspan.plans.problem import Ints, needed_rows, union, whole_tiles
from ringspan.plans.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Matrices with a row for each rank of the workload and a column for each rank of the world.

    ``seconds``: compute time with the rows of the column's rank, including the kernel's passes over those rows.
    ``incoming``: rows needed from that rank. ``outgoing``: rows which that rank needs. The entry of a rank with itself
    counts its own rows, which are not sent.
    """

    seconds: dict[Phase, Seconds]
    incoming: Ints
    outgoing: Ints


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Mask, layouts, machine and tensors. ``ranks`` are the ranks to cost, in order: all of the world, or a sample."""

    mask: Mask
    q_layout: Layout
    kv_layout: Layout
    ranks: tuple[int, ...]
    machine: Hardware
    shape: Shape
    dkv_dtype: DkvDtype = AS_ACCUMULATED

    @property
    def world(self) -> int:
        return self.q_layout.world

    @cached_property
    def whole(self) -> Workload:
        """The same workload with all ranks."""
        return replace(self, ranks=tuple(range(self.world)))

    def message_row_bytes(self, what: PayloadKind, phase: Phase) -> int:
        """Return the bytes of one row of all heads in a message."""
        return self.shape.message_row_bytes(what, phase, dkv_dtype=self.dkv_dtype)

    def demand(self, moving: MovingSide) -> Demand:
        """Return the work and the rows if keys move to the queries, or queries to the keys."""
        return self._demand_of_keys if moving is KEYS else self._demand_of_queries

    @cached_property
    def _demand_of_keys(self) -> Demand:
        """Ranks compute for their own queries."""
        if len(self.ranks) == self.world:
            rows = needed_rows(self.mask, self.q_layout, self.kv_layout)
            return Demand(seconds=self._with_passes(KEYS, self._seen, self._for_queries, rows), incoming=rows, outgoing=rows.T)
        return self._demand(KEYS, self._seen, self._seeing, self._for_queries)

    @cached_property
    def _demand_of_queries(self) -> Demand:
        """Ranks compute with their own keys."""
        return self._demand(QUERIES, self._seeing, self._seen, self._with_keys)

    def busiest(self, moving: MovingSide) -> float:
        """Return the compute time of the busiest rank, if this side moves."""
        computing = self._for_queries if moving is KEYS else self._with_keys
        return sum(float(seconds.sum(axis=1).max(initial=0.0)) for seconds in computing.values())

    @cached_property
    def is_near(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether a rank of the world (column) is on the node of a rank of the workload (row)."""
        node = np.arange(self.world) // self.machine.per_node
        near: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = node[list(self.ranks), None] == node[None, :]
        return near

    def launched(self, seconds: Seconds) -> Seconds:
        """Compute time, plus one launch wherever it is not zero."""
        return seconds + self.machine.launch_s * (seconds > 0)

    @cached_property
    def _seen(self) -> Tiles:
        if len(self.ranks) == self.world:
            return whole_tiles(self.mask, self.q_layout, self.kv_layout)
        return cut(self.mask, self.q_layout.pieces.of(*self.ranks), self.kv_layout.pieces)

    @cached_property
    def _seeing(self) -> Tiles:
        if len(self.ranks) == self.world:
            return whole_tiles(self.mask, self.q_layout, self.kv_layout)
        return cut(self.mask, self.q_layout.pieces, self.kv_layout.pieces.of(*self.ranks))

    @cached_property
    def _for_queries(self) -> dict[Phase, Seconds]:
        """Seconds of each rank of the workload, for its own queries with the keys of each rank of the world."""
        tiles, seconds = self._seen, tile_seconds(self._seen.bands, self.machine, self.shape)
        return {phase: self._matrix(tiles.q_rank, tiles.k_rank, seconds[phase]) for phase in PHASES}

    @cached_property
    def _with_keys(self) -> dict[Phase, Seconds]:
        """Seconds of each rank of the workload, with its own keys for the queries of each rank of the world."""
        if len(self.ranks) == self.world:
            return {phase: seconds.T for phase, seconds in self._for_queries.items()}
        tiles, seconds = self._seeing, tile_seconds(self._seeing.bands, self.machine, self.shape)
        return {phase: self._matrix(tiles.k_rank, tiles.q_rank, seconds[phase]) for phase in PHASES}

    def _demand(self, moving: MovingSide, computed: Tiles, elsewhere: Tiles, seconds: dict[Phase, Seconds]) -> Demand:
        """Return the matrices. ``computed`` are the tiles that the workload's ranks compute, ``elsewhere`` the tiles
        that use their rows on any rank."""
        here, of = (computed.q_rank, computed.k_rank) if moving is KEYS else (computed.k_rank, computed.q_rank)
        owner, receiver = (elsewhere.k_rank, elsewhere.q_rank) if moving is KEYS else (elsewhere.q_rank, elsewhere.k_rank)
        incoming = self._rows(here, of, computed.bands[:, moving.rows])
        return Demand(
            seconds=self._with_passes(moving, computed, seconds, incoming),
            incoming=incoming,
            outgoing=self._rows(owner, receiver, elsewhere.bands[:, moving.rows]),
        )

    def _with_passes(self, moving: MovingSide, tiles: Tiles, seconds: dict[Phase, Seconds], rows: Ints) -> dict[Phase, Seconds]:
        """Add the time of the kernel's passes over the rows that move, ``rows`` of each rank, and over the other rows in
        the tiles of a rank's own queries and keys. How many other rows the tiles of several ranks have together depends
        on how they are joined."""
        shape, machine, staying = self.shape, self.machine, QUERIES if moving is KEYS else KEYS
        of_query, of_key = passes_row_bytes(machine, shape, "backward", heads=shape.heads, kv_heads=shape.kv_heads)
        of_moving, of_staying = (of_key, of_query) if moving is KEYS else (of_query, of_key)
        passes: Seconds = (rows * of_moving).astype(np.float64)
        own = tiles.q_rank == tiles.k_rank
        rank, start, stop = union(tiles.q_rank[own], *tiles.bands[own][:, staying.rows].T)
        own_rows = np.bincount(rank, weights=stop - start, minlength=self.world)
        ranks = list(self.ranks)
        passes[np.arange(len(ranks)), ranks] += own_rows[ranks] * of_staying
        return {**seconds, "backward": seconds["backward"] + passes / machine.copy_bytes_per_s}

    def _rows(self, here: Ints, there: Ints, rows: Table) -> Ints:
        pair, start, stop = union(here * self.world + there, rows[:, 0], rows[:, 1])
        return self._matrix(*np.divmod(pair, self.world), stop - start).astype(np.int64)

    def _matrix(self, here: Ints, there: Ints, value: Seconds | Ints) -> Seconds:
        """Return the sums of the values for each rank of the workload and each rank of the world."""
        row = np.searchsorted(self.ranks, here)
        size = len(self.ranks), self.world
        total: Seconds = np.bincount(row * self.world + there, weights=value, minlength=size[0] * size[1]).astype(np.float64)
        return total.reshape(size)


def tile_seconds(bands: Table, machine: Hardware, shape: Shape) -> dict[Phase, Seconds]:
    """Return a lower bound of the compute time of each band, without launches; see
    :func:`ringspan.costs.plan_cost.tiled_area`.

    The planner may join bands that a layout has split, such as a rectangle and a triangle. The joined band usually has
    at least as many diagonals as each of them. So the time of a band is computed with the highest speed of all kinds of
    band that have at least as many diagonals. :meth:`ringspan.strategies.Strategy.loads` describes the exception.
    """
    q0, q1, k0, k1, lo, hi = bands.T
    kind = (lo > k0 - q1 + 1).astype(np.int64) + (hi < k1 - 1 - q0)
    across = np.minimum(machine.tile, hi - lo + 1)
    tiled = area(bands) + kind * across / 2 * np.minimum(q1 - q0, k1 - k0)
    speeds = {"forward": machine.forward, "backward": machine.backward}
    best = {phase: [max(of_kind(speeds[phase], cuts) for cuts in range(fewest, 3)) for fewest in range(3)] for phase in PHASES}
    return {phase: tiled * (shape.heads * flops_per_pair(shape, phase)) / np.array(best[phase])[kind] for phase in PHASES}
