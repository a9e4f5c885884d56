"""Which layouts and strategies are worth a look, the simpler first."""

from __future__ import annotations

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.plan_cost import rounded
from ringspan.costs.workload import Workload
from ringspan.layouts import Layout, areas, balance, named_layout
from ringspan.layouts.auto import GOOD_ENOUGH
from ringspan.masks import Mask
from ringspan.plans.moving_side import KEYS
from ringspan.plans.problem import needed_rows
from ringspan.plans.shape import Shape
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.registry import STRATEGIES, spec

# Where a simple layout has at most this balance, one that looks at the work could save too little to be made.
EVEN_ENOUGH = 1.02
# It is perfectly even, and cuts every document into two pieces for each rank: for so few documents that pieces stay
# long.
FOR_FEW_DOCUMENTS, DOCUMENTS_PER_RANK = "per_document", 2
# It cuts windows into rectangles and triangles, which is worth its many keys where a kernel is slow in bands of two
# diagonals.
FOR_SLOW_WINDOWS = "round_robin"
# With more ranks than these, balanced takes minutes to make.
MANY_RANKS = 1024


def layouts_for(mask: Mask, world: int, machine: Hardware, shape: Shape, kv_layout: Layout | None = None) -> list[Layout]:
    """Each once, and none that asks for as much work and as many keys as a simpler one. Keys lie as queries do where
    ``kv_layout`` is None."""
    if world > MANY_RANKS:
        return _quick_layouts(mask, world)
    slow_windows = _has_slow_windows(mask, machine)
    found: list[Layout] = []
    asked: list[tuple[float, int]] = []
    for name in ("contiguous", "zigzag", *_by_work(mask, world), *([FOR_SLOW_WINDOWS] if slow_windows else [])):
        layout, _ = named_layout(name, mask, world)
        keys_at = kv_layout or layout
        # A layout for slow windows has no fewer pairs than others, and faster ones.
        work = _seconds(mask, layout, keys_at, machine, shape) if slow_windows else areas(mask, layout).max(initial=0)
        keys = _most_fetched(mask, layout, keys_at)
        if not any(w <= work and k <= keys for w, k in asked):
            found.append(layout)
            asked.append((work, keys))
    return found


def _has_slow_windows(mask: Mask, machine: Hardware) -> bool:
    return machine.forward.window < machine.forward.causal / 2 and any(b.cut_below and b.cut_above for b in mask.bands)


def _seconds(mask: Mask, q_layout: Layout, kv_layout: Layout, machine: Hardware, shape: Shape) -> float:
    """Of computing, on the busiest rank."""
    ranks = tuple(range(q_layout.world))
    workload = Workload(mask=mask, q_layout=q_layout, kv_layout=kv_layout, ranks=ranks, machine=machine, shape=shape)
    return rounded(workload.busiest(KEYS))


def _by_work(mask: Mask, world: int) -> list[str]:
    """Layouts that look at the work, for masks whose work the simple ones do not share evenly.

    Zigzag may be as even by chance and yet scatter documents, which ``balanced`` keeps together.
    """
    documents = len(mask.documents()) - 1 if mask.lengths[0] == mask.lengths[1] else 1
    simple = ("contiguous", "zigzag") if documents <= 1 else ("contiguous",)
    if any(balance(mask, named_layout(name, mask, world)[0]) <= EVEN_ENOUGH for name in simple):
        return []
    return ["balanced", *([FOR_FEW_DOCUMENTS] if 1 < documents <= DOCUMENTS_PER_RANK * world else [])]


def _quick_layouts(mask: Mask, world: int) -> list[Layout]:
    """For thousands of ranks; round_robin stands in for balanced where the others are uneven."""
    simple = [named_layout(name, mask, world)[0] for name in ("contiguous", "zigzag")]
    uneven = all(balance(mask, layout) > GOOD_ENOUGH for layout in simple)
    return [*simple, *([named_layout("round_robin", mask, world)[0]] if uneven else [])]


def _most_fetched(mask: Mask, q_layout: Layout, kv_layout: Layout) -> int:
    """The keys of others that a rank needs, or that others need of it; the most on any rank."""
    away = needed_rows(mask, q_layout, kv_layout) * (1 - np.eye(q_layout.world, dtype=np.int64))
    return int(max(away.sum(axis=0).max(), away.sum(axis=1).max()))


def strategies_for(world: int, machine: Hardware, shape: Shape) -> list[str]:
    """What the registered strategies offer, in the order of the registry."""
    kinds = (kind for kind in STRATEGIES.values() if issubclass(kind, Strategy))
    return [spec(strategy) for kind in kinds for strategy in kind.candidates(world, machine, shape)]
