"""Which layouts and strategies are worth a look, the simpler first."""

from __future__ import annotations

import numpy as np

from ringspan.layouts import Layout, areas, balance, named_layout
from ringspan.layouts.auto import GOOD_ENOUGH
from ringspan.masks import Mask
from ringspan.plans.exchange import Exchange
from ringspan.plans.gather import Gather
from ringspan.plans.hardware import Hardware
from ringspan.plans.hierarchical import Hierarchical
from ringspan.plans.hybrid import Hybrid
from ringspan.plans.pass_q import PassQ
from ringspan.plans.registry import Strategy, spec
from ringspan.plans.ring import Ring
from ringspan.plans.scene import needed_rows
from ringspan.plans.shape import Shape
from ringspan.plans.ulysses import Ulysses

# Where a simple layout has at most this balance, one that looks at the work could save too little to be made.
EVEN_ENOUGH = 1.02
# It is perfectly even, and cuts every document into two pieces for each rank: for so few documents that pieces stay long.
FOR_FEW_DOCUMENTS, DOCUMENTS_PER_RANK = "per_document", 2
# It cuts windows into rectangles and triangles, which is worth its many keys where a kernel is slow in bands of two diagonals.
FOR_SLOW_WINDOWS = "round_robin"
# With more ranks than these, balanced takes minutes to make.
MANY_RANKS = 1024


def layouts_for(mask: Mask, world: int, machine: Hardware) -> list[Layout]:
    """Each once, and none that asks for as much work and as many keys as a simpler one."""
    if world > MANY_RANKS:
        return _quick_layouts(mask, world)
    found: list[Layout] = []
    asked: list[tuple[int, int]] = []
    for name in ("contiguous", "zigzag", *_by_work(mask, world)):
        layout, _ = named_layout(name, mask, world)
        pairs, keys = int(areas(mask, layout).max(initial=0)), _most_fetched(mask, layout)
        if not any(p <= pairs and k <= keys for p, k in asked):
            found.append(layout)
            asked.append((pairs, keys))
    if machine.forward.window < machine.forward.causal / 2:
        found.append(named_layout(FOR_SLOW_WINDOWS, mask, world)[0])
    return found


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


def _most_fetched(mask: Mask, layout: Layout) -> int:
    """The keys of others that a rank needs, or that others need of it; the most on any rank."""
    if mask.lengths[0] != mask.lengths[1]:  # where the keys lie is another question
        return 0
    away = needed_rows(mask, layout, layout) * (1 - np.eye(layout.world, dtype=np.int64))
    return int(max(away.sum(axis=0).max(), away.sum(axis=1).max()))


def strategies_for(world: int, machine: Hardware, shape: Shape, *, split_heads: bool = True) -> list[str]:
    """``split_heads``: also those that depend on how many heads there are."""
    if world == 1:
        return [spec(Gather())]
    found: list[Strategy] = [Exchange(stages=1), Exchange(stages=2), Ring(), Gather()]
    if split_heads and world <= shape.heads:
        found.append(Ulysses(heads=shape.heads, kv_heads=shape.kv_heads))
    if machine.per_node < world:
        found.append(Hierarchical(per_node=machine.per_node))
        if split_heads and world % machine.per_node == 0 and machine.per_node > 1:
            found.append(Hybrid(per_node=machine.per_node, heads=shape.heads, kv_heads=shape.kv_heads))
    return [spec(strategy) for strategy in (*found, PassQ())]
