"""The layouts and strategies that the automatic choice compares, the simplest first."""

from __future__ import annotations

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.plan_cost import rounded
from ringspan.costs.workload import Workload
from ringspan.layouts import Layout, areas, balance, for_nodes, named_layout
from ringspan.layouts.auto import GOOD_ENOUGH
from ringspan.masks import BatchMask, Mask
from ringspan.plans.moving_side import KEYS
from ringspan.plans.problem import needed_rows
from ringspan.plans.shape import Shape
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.registry import STRATEGIES, spec

# If a simple layout has at most this imbalance, a layout that balances the work could save too little.
EVEN_ENOUGH = 1.02
# This layout is perfectly balanced, but it cuts every document into two pieces for each rank. It is tried for few
# documents, whose pieces stay long, and if the tiles between these pieces are few: each is planned.
FOR_FEW_DOCUMENTS, DOCUMENTS_PER_RANK, MAX_TILES = "per_document", 2, 2**17
# This layout cuts windows into rectangles and triangles. It needs many keys, but it pays if a kernel is slow in
# windows. Its ranks have unequal numbers of tokens, so it cannot give a rank as many of each row of a batch.
FOR_SLOW_WINDOWS = "round_robin"
# With more ranks than this, making the layout ``balanced`` takes minutes.
MAX_RANKS_BALANCED = 1024


def layouts_for(mask: Mask, world: int, machine: Hardware, shape: Shape, kv_layout: Layout | None = None) -> list[Layout]:
    """Return the layouts of the queries to compare. A layout is left out if a simpler one needs no more work and no
    more keys.

    If ``kv_layout`` is None the keys have the same layout.
    """
    if world > MAX_RANKS_BALANCED:
        return _quick_layouts(mask, world)
    slow_windows = _has_slow_windows(mask, machine) and not isinstance(mask, BatchMask)
    found: list[Layout] = []
    works: list[float] = []

    def keys(layout: Layout) -> int:  # counted only for layouts between which the work does not decide
        return _most_fetched(mask, layout, kv_layout or layout)

    names = ("contiguous", "zigzag", *_by_work(mask, world, machine), *([FOR_SLOW_WINDOWS] if slow_windows else []))
    for name in names:
        layout, _ = named_layout(name, mask, world)
        keys_at = kv_layout or layout
        # The layout for slow windows has no fewer pairs than others, but in bands that are computed faster.
        work = _seconds(mask, layout, keys_at, machine, shape) if slow_windows else areas(mask, layout).max(initial=0)
        simpler = [other for other, least in zip(found, works, strict=True) if least <= work]
        if not any(keys(other) <= keys(layout) for other in simpler):
            found.append(layout)
            works.append(work)
    return found


def _has_slow_windows(mask: Mask, machine: Hardware) -> bool:
    return machine.forward.window < machine.forward.causal / 2 and any(b.cut_below and b.cut_above for b in mask.bands)


def _seconds(mask: Mask, q_layout: Layout, kv_layout: Layout, machine: Hardware, shape: Shape) -> float:
    """Return the compute time of the busiest rank."""
    ranks = tuple(range(q_layout.world))
    workload = Workload(mask=mask, q_layout=q_layout, kv_layout=kv_layout, ranks=ranks, machine=machine, shape=shape)
    return rounded(workload.busiest(KEYS))


def _by_work(mask: Mask, world: int, machine: Hardware) -> list[str]:
    """Return the layouts that balance the work, for masks that the simple ones do not balance.

    Zigzag may be balanced by chance and yet scatter documents, which ``balanced`` keeps together.
    """
    documents = len(mask.documents()) - 1 if mask.lengths[0] == mask.lengths[1] else 1
    simple = ("contiguous", "zigzag") if documents <= 1 else ("contiguous",)
    if any(balance(mask, named_layout(name, mask, world)[0]) <= EVEN_ENOUGH for name in simple):
        return []
    balanced = str(for_nodes("balanced", world, machine.per_node))
    are_few = 1 < documents <= DOCUMENTS_PER_RANK * world and len(mask) * (2 * world) ** 2 <= MAX_TILES
    return [balanced, *([FOR_FEW_DOCUMENTS] if are_few else [])]


def _quick_layouts(mask: Mask, world: int) -> list[Layout]:
    """Return layouts for thousands of ranks: round_robin instead of balanced, where the others are not balanced and the
    rows of a batch have one mask."""
    simple = [named_layout(name, mask, world)[0] for name in ("contiguous", "zigzag")]
    uneven = not isinstance(mask, BatchMask) and all(balance(mask, layout) > GOOD_ENOUGH for layout in simple)
    return [*simple, *([named_layout("round_robin", mask, world)[0]] if uneven else [])]


def _most_fetched(mask: Mask, q_layout: Layout, kv_layout: Layout) -> int:
    """Return the largest number of keys that a rank receives from others or sends to them."""
    away = needed_rows(mask, q_layout, kv_layout) * (1 - np.eye(q_layout.world, dtype=np.int64))
    return int(max(away.sum(axis=0).max(), away.sum(axis=1).max()))


def strategies_for(world: int, machine: Hardware, shape: Shape) -> list[str]:
    """Return the candidates of the registered strategies, in the order of the registry."""
    kinds = (kind for kind in STRATEGIES.values() if issubclass(kind, Strategy))
    return [spec(strategy) for kind in kinds for strategy in kind.candidates(world, machine, shape)]
