"""What ``"auto"`` means: the candidates for a mask, costed on a machine that was named or is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ringspan.caching.by_digest import cache_by_digest
from ringspan.costs.hardware import Hardware, hardware
from ringspan.costs.workload import Site
from ringspan.layouts import Layout, check_world
from ringspan.masks import Mask
from ringspan.planner.candidates import layouts_for, strategies_for
from ringspan.planner.choose import Choice, Hear, choose
from ringspan.planner.samples import sample
from ringspan.plans.data import Plan
from ringspan.plans.shape import EXAMPLE, Shape
from ringspan.strategies.make import plan_rank

ASSUMED = "h200x8"
# So many ranks are planned to see what a candidate costs at least; all, if there are no more.
MOST_RANKS = 16


def best(
    mask: Mask,
    world: int,
    *,
    strategy: str | None,
    layout: Layout | None,
    kv_layout: Layout | None,
    machine: Hardware | None,
    shape: Shape | None,
    hear: Hear | None = None,
) -> Choice:
    """The choice of what is None. Keys lie as queries do where ``kv_layout`` is None.

    A machine that nobody named must not refuse a plan for want of memory, and heads that nobody counted are not split. Whoever
    hears how far it is has it found anew, for there is nothing to hear of what is looked up.
    """
    find = _cached_find if hear is None else partial(_find, hear=hear)
    return find(
        mask,
        check_world(world),
        strategy,
        layout,
        kv_layout,
        hardware(ASSUMED) if machine is None else machine,
        EXAMPLE if shape is None else shape,
        shape is not None or strategy is not None,
        machine is not None,
    )


def _find(
    mask: Mask,
    world: int,
    strategy: str | None,
    layout: Layout | None,
    kv_layout: Layout | None,
    machine: Hardware,
    shape: Shape,
    may_split_heads: bool,
    must_fit: bool,
    hear: Hear | None = None,
) -> Choice:
    layouts = layouts_for(mask, world, machine, shape, kv_layout) if layout is None else [layout]
    strategies = strategies_for(world, machine, shape) if strategy is None else [strategy]
    sites = [site_of(mask, one, kv_layout or one, machine, shape, MOST_RANKS) for one in layouts]
    return choose(sites, strategies, plans_at, may_split_heads=may_split_heads, must_fit=must_fit, hear=hear)


_cached_find = cache_by_digest(256)(_find)


def site_of(mask: Mask, q_layout: Layout, kv_layout: Layout, machine: Hardware, shape: Shape, most_ranks: int) -> Site:
    ranks = sample(mask, q_layout, kv_layout, machine, most_ranks)
    return Site(mask=mask, q_layout=q_layout, kv_layout=kv_layout, ranks=ranks, machine=machine, shape=shape)


def plans_at(site: Site, strategy: str) -> Sequence[Plan]:
    return [plan_rank(site.mask, site.q_layout, site.kv_layout, strategy, rank) for rank in site.ranks]


def said(choice: Choice, machine: Hardware | None, shape: Shape | None) -> list[str]:
    """What a plan notes of its choice: what it is the best of, on what that stands, and the candidates as a table."""
    at, tensors = machine or hardware(ASSUMED), shape or EXAMPLE
    chosen, planned = choice.best, sum(candidate.cost is not None for candidate in choice.candidates)
    why = f"the best of {len(choice.candidates)} candidates"
    if chosen.rejected:
        why = f"takes the least memory of {planned} candidates that were planned, none of which fits,"
    lines = [f"{chosen.strategy} on {chosen.layout.name}: {why} on {at.name}, nodes of {at.per_node}; {tensors.words}"]
    if chosen.cost is not None and not chosen.cost.is_exact:
        lines.append(
            f"sampled: {len(chosen.cost.ranks)} of {chosen.cost.world:,} ranks were planned, and may not be the slowest"
        )
    assumed = {"hardware=": machine, "shape=": shape}
    name_them = " and ".join(name for name, given in assumed.items() if given is None)
    return [*lines, *([f"assumed where not given: name yours with {name_them}"] if name_them else []), *choice.table()]
