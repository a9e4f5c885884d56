"""Planning: the plan of one rank for a mask, and the automatic choice of layout and strategy."""

from __future__ import annotations

import operator
import warnings
from typing import Any

from ringspan.caching import clear_caches
from ringspan.caching.by_digest import clear_digest_caches
from ringspan.costs import Hardware, named_hardware
from ringspan.errors import PlanError
from ringspan.layouts import Layout, LayoutLike, make_layout
from ringspan.masks import Mask
from ringspan.planner import auto
from ringspan.planner.choose import Candidate, Choice, Hear
from ringspan.plans import Plan, Shape, check_shape
from ringspan.strategies import Strategy, plan_rank, register, spec


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
) -> Plan:
    """The plan of one rank. Pure and deterministic: every rank computes its own, and they fit together.

    ``layout`` is for the queries; the keys have the same one unless their number differs or ``kv_layout`` is given. What is
    ``"auto"`` is the fastest on ``hardware`` (a name as ``"h200x8"``, or a :class:`Hardware`) for tensors of a ``shape``. Where
    these are not given they are assumed, and :meth:`Plan.explain` says so; but nothing is chosen that splits heads which
    nobody has counted.

    >>> from ringspan import causal
    >>> plan(causal(16), world=4, rank=1, strategy="ring", layout="zigzag")
    <Plan ... ring on zigzag: rank 1 of 4, 4 queries × 4 keys, area 34, 4 steps>
    """
    if not isinstance(mask, Mask):
        raise PlanError(f"the first argument must be a mask, as from ringspan.causal(n); got {type(mask).__name__}")
    notes: list[str] = []
    way, q_layout, k_layout = _asked(mask, world, strategy, layout, kv_layout, notes)
    if way is None or q_layout is None:
        machine, shape = _machine(hardware), _shape(shape)
        choice = auto.best(mask, world, strategy=way, layout=q_layout, kv_layout=k_layout, machine=machine, shape=shape)
        way, q_layout = choice.best.strategy, choice.best.layout
        notes += auto.said(choice, machine, shape)
    return plan_rank(mask, q_layout, k_layout or q_layout, way, _rank(rank, q_layout.world), tuple(notes))


def best_on(
    mask: Mask,
    *,
    world: int,
    hardware: str | Hardware,
    shape: Shape | None = None,
    strategy: str | Strategy = "auto",
    layout: LayoutLike = "auto",
    kv_layout: LayoutLike | None = None,
    hear: Hear | None = None,
) -> Choice:
    """All candidates on a machine, with what they cost, the best first. What is not ``"auto"`` is taken as given.

    The best is what :func:`plan` makes of the same arguments. ``hear`` is told how far it is: a share of the candidates, and
    which one is planned.
    """
    way, q_layout, k_layout = _asked(mask, world, strategy, layout, kv_layout, [])
    return auto.best(
        mask,
        world,
        strategy=way,
        layout=q_layout,
        kv_layout=k_layout,
        machine=named_hardware(hardware),
        shape=_shape(shape),
        hear=hear,
    )


def _asked(
    mask: Mask, world: int, strategy: str | Strategy, layout: LayoutLike, kv_layout: LayoutLike | None, notes: list[str]
) -> tuple[str | None, Layout | None, Layout | None]:
    """The strategy and the layouts of queries and keys as far as they were given, and notes that say so.

    None: to be chosen; of the keys: they lie as the queries do.
    """
    way, q_layout, k_layout = None, None, None
    is_named = isinstance(layout, str) and layout != "auto"
    if is_named or not isinstance(layout, str):
        q_layout, note = make_layout(layout, mask, world)
        notes.append(note)
    if kv_layout is not None or mask.lengths[0] != mask.lengths[1]:
        of_keys = kv_layout if kv_layout is not None else layout if is_named else "contiguous"
        k_layout, note = make_layout(of_keys, mask.transposed, world)
        notes.append(f"kv {note}")
    if strategy != "auto":
        way = spec(strategy)
        notes.append(f"strategy {way}: as asked")
    return way, q_layout, k_layout


def _machine(given: str | Hardware | None) -> Hardware | None:
    return None if given is None else named_hardware(given)


def _shape(given: Shape | None) -> Shape | None:
    return None if given is None else check_shape(given)


def _rank(rank: Any, world: int) -> int:
    try:
        checked = operator.index(rank)
    except TypeError:
        checked = -1
    if not 0 <= checked < world:
        raise PlanError(f"rank must be one of 0 … {world - 1}, not {rank!r}")
    return checked


def register_strategy(name: str, strategy: type[Any]) -> None:
    """Make a planner of your own known by a name: a frozen dataclass whose instances map a Scene to a Program."""
    register(name, strategy)
    clear_digest_caches()  # plans of another strategy that had this name


def forget() -> None:
    """Deprecated: the former name of :func:`ringspan.clear_caches`."""
    warnings.warn("ringspan.planner.forget is now ringspan.clear_caches", DeprecationWarning, stacklevel=2)
    clear_caches()


__all__ = ["Candidate", "Choice", "Plan", "best_on", "forget", "plan", "register_strategy"]
