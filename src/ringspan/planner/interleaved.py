"""Join the plans of independent batches into one, whose exchanges hide behind the compute of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ringspan.errors import PlanError
from ringspan.layouts import Layout
from ringspan.layouts import end_to_end as layouts_end_to_end
from ringspan.masks import BatchMask
from ringspan.masks.end_to_end import end_to_end
from ringspan.planner.plan_class import Plan, plan_rank
from ringspan.strategies import Interleave, spec


def interleave_plans(plans: Sequence[Plan]) -> Plan:
    """Return one plan for the sequences of several plans of a rank, laid end to end (strategies/interleave.py)."""
    first = plans[0]
    for i, plan in enumerate(plans):
        if (plan.rank, plan.world) != (first.rank, first.world):
            raise PlanError(
                f"plan {i} is that of rank {plan.rank} of {plan.world}, plan 0 that of rank {first.rank} of {first.world}: "
                "interleave the plans of one rank"
            )
        if isinstance(plan.mask, BatchMask) or plan.mask.predicate is not None:
            what = "differs between the rows of a batch" if isinstance(plan.mask, BatchMask) else "is defined by a function"
            raise PlanError(f"the mask of plan {i}, {plan.mask.name}, {what}: interleave takes masks of bands")
        if plan.program.dkv_dtype != first.program.dkv_dtype:
            raise PlanError(f"dkv_dtype is {plan.program.dkv_dtype} in plan {i}, and {first.program.dkv_dtype} in plan 0")
    queries, keys = (list(accumulate(plan.mask.lengths[i] for plan in plans)) for i in (0, 1))
    strategy = Interleave(parts=tuple(p.strategy for p in plans), starts=tuple(zip(queries[:-1], keys[:-1], strict=True)))
    name = f"interleave({', '.join(plan.mask.name for plan in plans)})"
    q_layout, kv_layout = (_joined([getattr(plan, of) for plan in plans]) for of in ("q_layout", "kv_layout"))
    notes = tuple(f"part {i}: {note}" for i, plan in enumerate(plans) for note in plan.notes)
    mask = end_to_end([plan.mask for plan in plans], name)
    return plan_rank(mask, q_layout, kv_layout, spec(strategy), first.rank, notes, first.program.dkv_dtype)


def _joined(layouts: Sequence[Layout]) -> Layout:
    return layouts_end_to_end(layouts, " + ".join(dict.fromkeys(layout.name for layout in layouts)))
