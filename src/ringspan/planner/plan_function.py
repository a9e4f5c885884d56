"""``ringspan.plan``: make the plan of one rank. Layout and strategy are chosen automatically unless given."""

from __future__ import annotations

import logging
import operator
from typing import Any

from ringspan.costs.hardware import Hardware
from ringspan.costs.hardware import hardware as named_hardware
from ringspan.errors import PlanError
from ringspan.layouts import LayoutLike
from ringspan.masks import Mask
from ringspan.planner import auto
from ringspan.planner.plan_class import Plan, check_dkv_dtype, plan_rank
from ringspan.planner.plan_request import check_request
from ringspan.plans.data import DkvDtype
from ringspan.plans.shape import Shape, check_shape
from ringspan.strategies.protocol import Strategy

log = logging.getLogger("ringspan.planner")


def plan(
    mask: Mask,
    *,
    world: int,
    rank: int = 0,
    strategy: str | Strategy = "auto",
    layout: LayoutLike = "auto",
    kv_layout: LayoutLike | None = None,
    hardware: str | Hardware | None = None,
    shape: Shape | None = None,
    dkv_dtype: DkvDtype = "float32",
) -> Plan:
    """Make the plan of one rank. It is deterministic: every rank makes its own plan, and the plans match.

    ``layout`` is the layout of the queries. The keys have the same one unless their number differs or ``kv_layout`` is
    given. ``"auto"`` chooses the fastest on ``hardware`` (a name such as ``"h200x8"``, or a :class:`Hardware`) for
    tensors of a ``shape``, and ``"balanced"`` is made for the nodes of the ``hardware``. If these are not given they
    are assumed, and :meth:`Plan.explain` says so; a named layout is then made without nodes. Without a shape no
    strategy is chosen that splits heads, because their number is not known.

    ``dkv_dtype`` is the dtype in which gradients of keys and values are sent. ``"bfloat16"`` halves their bytes and
    rounds each message; docs/numerics.md has the errors.

    >>> from ringspan import causal
    >>> plan(causal(16), world=4, rank=1, strategy="ring", layout="zigzag")
    <Plan ... ring on zigzag: rank 1 of 4, 4 queries × 4 keys, area 34, 4 steps>
    """
    if not isinstance(mask, Mask):
        raise PlanError(f"the first argument must be a mask, as from ringspan.causal(n); got {type(mask).__name__}")
    machine = None if hardware is None else named_hardware(hardware)
    request = check_request(mask, world, strategy=strategy, layout=layout, kv_layout=kv_layout, machine=machine)
    text, q_layout, k_layout, notes = request
    dkv_dtype = check_dkv_dtype(dkv_dtype)
    if text is None or q_layout is None:
        shape = None if shape is None else check_shape(shape)
        choice = auto.best(mask, world, request, machine=machine, shape=shape, dkv_dtype=dkv_dtype)
        text, q_layout = choice.best.strategy, choice.best.layout
        notes += auto.describe(choice, machine, shape)
    rank = _check_rank(rank, q_layout.world)
    made = plan_rank(mask, q_layout, k_layout or q_layout, text, rank, notes, dkv_dtype)
    log.debug("made %r of %s", made, mask.name)
    return made


def _check_rank(rank: Any, world: int) -> int:
    try:
        checked = operator.index(rank)
    except TypeError:
        checked = -1
    if not 0 <= checked < world:
        raise PlanError(f"rank must be one of 0 … {world - 1}, not {rank!r}")
    return checked
