"""The layouts of tensors that carry none: what torch's documentation says that their order is, or an error.

A sharded BlockMask and an open ``context_parallel`` block have layouts of their own. All other tensors are in head-tail
order if ``_cp_options.enable_load_balance`` is on, and in sequence order if it is off. ``_context_parallel_shard`` sets
this switch. If tensors of one length were sharded in several orders (:mod:`ringspan.compat.shardings`), an error is
raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.compat.balancers import Layouts, _HeadTailLoadBalancer, _LoadBalancer
from ringspan.compat.options import _cp_options
from ringspan.compat.shardings import CONTIGUOUS, HEAD_TAIL, STATES, Shardings
from ringspan.errors import InputError
from ringspan.layouts import Layout, zigzag
from ringspan.masks import full


def record_sharding(shardings: Shardings, balancer: _LoadBalancer | None, layouts: Sequence[Layouts]) -> None:
    """Record a call of ``_context_parallel_shard`` with the layouts of its tensors, and set the switch like torch."""
    vars(_cp_options)["enable_load_balance"] = balancer is not None  # an assignment would declare the order of earlier ones
    for of_tensor in layouts:
        order, counts = order_of(balancer, of_tensor), of_tensor[0].counts
        shardings.record(order, sum(counts), is_even=len(set(counts)) == 1)
    STATES.note(balancer is not None)


def order_of(balancer: _LoadBalancer | None, layouts: Layouts) -> str:
    """Return the order of tensors that a balancer has sharded: one of the two named orders, or the balancer's class."""
    if balancer is None:
        return CONTIGUOUS
    if type(balancer) is _HeadTailLoadBalancer:
        return HEAD_TAIL
    # A balancer of the user, or of torch itself, can have one of the two orders as well.
    for order in (HEAD_TAIL, CONTIGUOUS):
        if len(layouts) == 1 and np.array_equal(layouts[0].order(), _layout(order, layouts[0].counts).order()):
            return order
    return type(balancer).__name__


def default_layouts(counts: tuple[int, ...], orders: tuple[str, ...], *, remedy: str) -> Layouts:
    """Return the layouts of tensors of which the ranks hold ``counts`` tokens, and which are in one of these orders.

    All of the orders must give the same layout. ``remedy`` ends the error messages.
    """
    others = [order for order in orders if order not in (HEAD_TAIL, CONTIGUOUS)]
    if others:
        raise InputError(
            f"tensors of {sum(counts)} tokens were sharded by {' and '.join(others)}, and this one may be in its order: "
            f"{remedy}; if it is in head-tail or sequence order, set _cp_options.enable_load_balance to say which"
        )
    layouts = tuple({_layout(order, counts) for order in orders})
    if len(layouts) > 1:
        names = " and ".join(sorted(layout.name for layout in layouts))
        raise InputError(
            f"tensors of {sum(counts)} tokens were sharded in several orders ({names}; zigzag is head-tail), and this one may "
            f"be in any of them: set _cp_options.enable_load_balance to say which, or {remedy}"
        )
    if layouts[0].counts != counts:
        raise InputError(
            f"the ranks hold {counts} tokens, but in head-tail order, which _cp_options.enable_load_balance says, they would "
            f"hold {layouts[0].counts}: set it to False if the shards are contiguous, or {remedy}"
        )
    return layouts


@cache_by_digest(1024, plain=True)
def _layout(order: str, counts: tuple[int, ...]) -> Layout:
    """Return the layout of these token counts. In head-tail order the counts follow from their sum."""
    if order == HEAD_TAIL and len(counts) > 1:
        return zigzag(full(sum(counts)), len(counts))
    return contiguous_of_counts(counts)


@cache_by_digest(1024, plain=True)
def contiguous_of_counts(counts: tuple[int, ...]) -> Layout:
    """Return contiguous shards of these sizes, in rank order."""
    return Layout([[(end - n, end)] for n, end in zip(counts, accumulate(counts), strict=True)], name="contiguous")
