"""``ringspan.interleave``: several independent batches in flight at once."""

from __future__ import annotations

from typing import overload

from ringspan.errors import InputError
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.planner import Plan
from ringspan.planner.interleaved import interleave_plans


@overload
def interleave(a: ContextParallel, b: ContextParallel, /, *more: ContextParallel) -> ContextParallel: ...


@overload
def interleave(a: Plan, b: Plan, /, *more: Plan) -> Plan: ...


def interleave(*parts: ContextParallel | Plan) -> ContextParallel | Plan:
    """Join independent batches, so that the messages of each overlap with the compute of all of them.

    ::

        a, b = (rs.ContextParallel(None, rs.documents(lengths)) for lengths in (lengths_a, lengths_b))
        both = rs.interleave(a, b)
        tokens = both.shard(torch.cat([tokens_a, tokens_b], dim=1), dim=1)
        with both:
            x = model(tokens)                      # each attention call computes both batches
        x_a, x_b = x.split([a.plan.q_rows, b.plan.q_rows], dim=1)

    The result is a ContextParallel of the sequences laid end to end. A rank has its tokens of the first batch, then
    those of the second. In each attention call, forward and backward, the steps of the batches are executed in turn:
    the messages of one are in flight while the other is computed. Results and gradients are bit for bit those of the
    batches one after the other. An error is an error of all of them.

    All parts must have the same group, back end and ``dkv_dtype``. Two plans of one rank give a plan.
    """
    if len(parts) < 2:
        raise InputError("interleave takes at least two plans, or two ContextParallels")
    plans = [part for part in parts if isinstance(part, Plan)]
    if len(plans) == len(parts):
        return interleave_plans(plans)
    contexts = [part for part in parts if isinstance(part, ContextParallel)]
    if len(contexts) != len(parts):
        given = ", ".join(type(part).__name__ for part in parts)
        raise InputError(f"interleave takes plans, or ContextParallels, and not both; got {given}")
    first = contexts[0]
    for i, other in enumerate(contexts):
        if other.group.group is not first.group.group or other.group.global_ranks != first.group.global_ranks:
            raise InputError(f"part {i} has another process group than part 0: interleave the batches of one group")
        if other.backend != first.backend:
            raise InputError(f"part {i} has backend={other.backend!r}, and part 0 {first.backend!r}")
    plan = interleave_plans([part.plan for part in contexts])
    return ContextParallel(
        first.group,
        plan.mask,
        strategy=plan.strategy,
        layout=plan.q_layout,
        kv_layout=plan.kv_layout,
        dkv_dtype=plan.program.dkv_dtype,
        backend=first.backend,
        expect_attention=first.expects_attention,
        cuda_graphs=all(part.cuda_graphs for part in contexts),
    )
