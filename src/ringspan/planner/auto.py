"""The automatic choice: the candidates for a mask, costed on the machine that was named or is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ringspan.caching.by_digest import cache_by_digest
from ringspan.costs.hardware import Hardware, hardware
from ringspan.costs.workload import Workload
from ringspan.layouts import Layout, check_world
from ringspan.masks import Mask
from ringspan.planner.candidates import layouts_for, strategies_for
from ringspan.planner.choose import SAMPLE_SIZE, Choice, OnProgress, choose, ranks_costed
from ringspan.planner.plan_class import Plan, plan_rank
from ringspan.planner.plan_request import PlanRequest
from ringspan.planner.samples import sample
from ringspan.plans.data import AS_ACCUMULATED, DkvDtype
from ringspan.plans.problem import estimated_tiles
from ringspan.plans.shape import EXAMPLE, Shape
from ringspan.strategies.registry import BY_STRATEGY_NAME

ASSUMED = "h200x8"
# Up to this many tiles, the bounds and columns of all ranks take little more time than those of a sample.
MAX_TILES_OF_ALL = 2**15


def best(
    mask: Mask,
    world: int,
    request: PlanRequest,
    *,
    machine: Hardware | None,
    shape: Shape | None,
    dkv_dtype: DkvDtype = AS_ACCUMULATED,
    on_progress: OnProgress | None = None,
) -> Choice:
    """Choose the layouts and the strategy that the request does not name.

    Without a machine one is assumed, and no plan is rejected for lack of memory. Without a shape heads are not split
    unless the request names such a strategy. The choice is cached, except with ``on_progress``, because a look-up has
    no progress to report.
    """
    find = _find_cached if on_progress is None else partial(_find, on_progress=on_progress)
    return find(
        mask,
        check_world(world),
        request.strategy,
        request.q_layout,
        request.kv_layout,
        hardware(ASSUMED) if machine is None else machine,
        EXAMPLE if shape is None else shape,
        shape is not None or request.strategy is not None,
        machine is not None,
        dkv_dtype,
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
    dkv_dtype: DkvDtype,
    on_progress: OnProgress | None = None,
) -> Choice:
    layouts = layouts_for(mask, world, machine, shape, kv_layout) if layout is None else [layout]
    strategies = strategies_for(world, machine, shape) if strategy is None else [strategy]
    workloads = []
    for one in layouts:
        is_small = world <= ranks_costed(world) and estimated_tiles(mask, one, kv_layout or one) <= MAX_TILES_OF_ALL
        most_ranks = world if is_small else SAMPLE_SIZE
        workloads.append(workload_of(mask, one, kv_layout or one, machine, shape, most_ranks, dkv_dtype))
    return choose(workloads, strategies, plans_at, may_split_heads=may_split_heads, must_fit=must_fit, on_progress=on_progress)


_find_cached = cache_by_digest(256, group=BY_STRATEGY_NAME)(_find)


def workload_of(
    mask: Mask,
    q_layout: Layout,
    kv_layout: Layout,
    machine: Hardware,
    shape: Shape,
    most_ranks: int,
    dkv_dtype: DkvDtype = AS_ACCUMULATED,
) -> Workload:
    return Workload(
        mask=mask,
        q_layout=q_layout,
        kv_layout=kv_layout,
        ranks=sample(mask, q_layout, kv_layout, machine, most_ranks),
        machine=machine,
        shape=shape,
        dkv_dtype=dkv_dtype,
    )


def plans_at(workload: Workload, strategy: str) -> Sequence[Plan]:
    """Return the plans of the workload's ranks, fitted to the heads of its tensors."""
    mask, q_layout, kv_layout, shape = workload.mask, workload.q_layout, workload.kv_layout, workload.shape
    plans = (plan_rank(mask, q_layout, kv_layout, strategy, rank, (), workload.dkv_dtype) for rank in workload.ranks)
    return [plan.for_heads(shape.heads, shape.kv_heads) for plan in plans]


def describe(choice: Choice, machine: Hardware | None, shape: Shape | None) -> tuple[str, ...]:
    """Return the notes of a plan about its choice: what was compared, what was assumed, and the candidates as a
    table."""
    at, tensors = machine or hardware(ASSUMED), shape or EXAMPLE
    chosen, planned = choice.best, sum(candidate.cost is not None for candidate in choice.candidates)
    why = f"the best of {len(choice.candidates)} candidates"
    if chosen.rejected:
        why = f"takes the least memory of {planned} candidates that were planned, none of which fits,"
    lines = [f"{chosen.strategy} on {chosen.layout.name}: {why} on {at.name}, nodes of {at.per_node}; {tensors.words}"]
    if chosen.cost is not None and not chosen.cost.is_exact:
        lines.append(
            f"sampled: {len(chosen.cost.ranks)} of {chosen.cost.world:,} ranks were planned, and may not be the slowest, so "
            "that a rejected candidate may be faster"
        )
    assumed = {"hardware=": machine, "shape=": shape}
    name_them = " and ".join(name for name, given in assumed.items() if given is None)
    return (*lines, *([f"assumed where not given: name yours with {name_them}"] if name_them else []), *choice.table())
