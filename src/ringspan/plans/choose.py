"""The best layout and strategy for a mask, a model and a machine: enumerate, cost, drop what does not fit, take the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ringspan.errors import PlanError
from ringspan.layouts import Layout, areas, named_layout
from ringspan.masks import Mask
from ringspan.plans.cost import Cost, cost, flops_per_pair
from ringspan.plans.data import Phase, Plan
from ringspan.plans.hardware import Hardware, Speed
from ringspan.plans.scene import needed_rows
from ringspan.plans.shape import Shape

LAYOUTS = ("contiguous", "zigzag", "balanced")
# It is perfectly even, and cuts every document into two pieces for each rank: for so few documents that pieces stay long.
FOR_FEW_DOCUMENTS, DOCUMENTS_PER_RANK = "per_document", 2
# It cuts windows into rectangles and triangles, which is worth its many keys where a kernel is slow in bands of two diagonals.
FOR_SLOW_WINDOWS = "round_robin"
# They share work by heads as well as by tokens, so that a layout's balance is no bound for them.
SPLIT_HEADS = ("ulysses", "hybrid")
# It shares work by heads alone, so that one layout is as good as another.
ANY_LAYOUT = "ulysses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to do it: what it costs, and why it was rejected, if it was."""

    layout: Layout
    strategy: str
    cost: Cost | None = None
    rejected: str | None = None

    def __str__(self) -> str:
        said = [f"rejected: {self.rejected}"] if self.rejected else []
        if self.cost is not None:
            said.insert(0, f"{self.cost.seconds * 1e3:.3g} ms, of which the wire shows {self.cost.exposed_s * 1e3:.3g} ms")
        return f"{self.strategy} on {self.layout.name}: {', '.join(said)}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Choice:
    """All candidates: from the fastest, which is the one to take, to the slowest, and then those that were rejected."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def __str__(self) -> str:
        return "\n".join(map(str, self.candidates))

    def __repr__(self) -> str:
        return f"<Choice of {len(self.candidates)}: {self.best}>"


def choose(
    mask: Mask,
    layouts: Sequence[Layout],
    strategies: Sequence[str],
    machine: Hardware,
    shape: Shape,
    plans_of: Callable[[Layout, str], Sequence[Plan]],
) -> Choice:
    """Cost every candidate that could be the fastest; all ranks choose alike.

    ``plans_of`` makes the plans of all ranks, or of a sample of them.
    """
    found: list[Candidate] = []
    fastest = float("inf")
    most_pairs = {layout.digest: int(areas(mask, layout).max(initial=0)) for layout in layouts}
    # The best balanced first, so that it sets the mark for the others.
    for layout, strategy in product(sorted(layouts, key=lambda x: most_pairs[x.digest]), strategies):
        if strategy.startswith(ANY_LAYOUT) and any(candidate.strategy == strategy for candidate in found):
            found.append(Candidate(layout=layout, strategy=strategy, rejected="it does the same on any layout"))
            continue
        bound = _least_seconds(most_pairs[layout.digest], machine, shape)
        if bound >= fastest and not strategy.startswith(SPLIT_HEADS):
            why = f"its busiest rank computes for {bound * 1e3:,.3g} ms at best"
            found.append(Candidate(layout=layout, strategy=strategy, rejected=why))
            continue
        figures = cost(plans_of(layout, strategy), machine, shape)
        why_not = None
        if figures.peak_bytes > machine.memory:
            why_not = f"needs {figures.peak_bytes / 2**30:,.1f} GiB for buffers, and a device has {machine.memory / 2**30:,.1f}"
        else:
            fastest = min(fastest, figures.seconds)
        found.append(Candidate(layout=layout, strategy=strategy, cost=figures, rejected=why_not))
    if all(candidate.rejected for candidate in found):
        raise PlanError(
            f"nothing fits {machine.name}: {'; '.join(map(str, found))}. Use more ranks, or a machine with more memory"
        )
    # A stable sort: of two that cost the same, the one that was tried first.
    order = sorted(found, key=lambda c: (c.rejected is not None, c.cost.seconds if c.cost else float("inf")))
    return Choice(candidates=tuple(order))


def layouts_for(mask: Mask, world: int, machine: Hardware) -> list[Layout]:
    """Those worth a look: each once, and none that asks for as much work and as many keys as a simpler one."""
    found: list[Layout] = []
    asked: list[tuple[int, int]] = []
    square = mask.lengths[0] == mask.lengths[1]
    has_few = square and 2 < len(mask.documents()) <= DOCUMENTS_PER_RANK * world + 1
    for name in (*LAYOUTS, *([FOR_FEW_DOCUMENTS] if has_few else [])):
        layout, _ = named_layout(name, mask, world)
        pairs, keys = int(areas(mask, layout).max(initial=0)), _most_fetched(mask, layout)
        if not any(p <= pairs and k <= keys for p, k in asked):
            found.append(layout)
            asked.append((pairs, keys))
    if machine.forward.window < machine.forward.causal / 2:
        found.append(named_layout(FOR_SLOW_WINDOWS, mask, world)[0])
    return found


def _most_fetched(mask: Mask, layout: Layout) -> int:
    """The keys of others that a rank needs, or that others need of it; the most on any rank."""
    if mask.lengths[0] != mask.lengths[1]:  # where the keys lie is another question
        return 0
    away = needed_rows(mask, layout, layout) * (1 - np.eye(layout.world, dtype=np.int64))
    return int(max(away.sum(axis=0).max(), away.sum(axis=1).max()))


def strategies_for(world: int, machine: Hardware, shape: Shape) -> list[str]:
    """Those worth a look, the simpler first."""
    if world == 1:
        return ["gather"]
    found = ["exchange(stages=1)", "exchange(stages=2)", "ring", "gather"]
    if world <= shape.heads:
        found.append(f"ulysses(heads={shape.heads}, kv_heads={shape.kv_heads})")
    if machine.per_node < world:
        found.append(f"hierarchical(per_node={machine.per_node})")
        if world % machine.per_node == 0 and machine.per_node > 1:
            found.append(f"hybrid(per_node={machine.per_node})")
    return [*found, "pass_q"]


def _least_seconds(pairs: int, machine: Hardware, shape: Shape) -> float:
    """What a rank with so many pairs needs for them if nothing else cost anything."""
    speeds: tuple[tuple[Phase, Speed], ...] = (("forward", machine.forward), ("backward", machine.backward))
    return sum(pairs * shape.heads * flops_per_pair(shape, phase) / speed.best for phase, speed in speeds)
