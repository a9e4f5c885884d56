"""Plans: pure functions from (mask, layout, strategy, rank) to data that says what a rank sends, receives and computes."""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

from ringspan.errors import PlanError
from ringspan.layouts import Layout, LayoutLike, make_layout, named_layout
from ringspan.masks import Mask
from ringspan.plans import head_split
from ringspan.plans import scene as scenes
from ringspan.plans.auto import auto
from ringspan.plans.choose import Candidate, Choice, choose, layouts_for, strategies_for
from ringspan.plans.contents import slot_contents
from ringspan.plans.cost import Cost, cost
from ringspan.plans.data import Plan, Program, Slot, Step, Task, Transfer
from ringspan.plans.exchange import Exchange
from ringspan.plans.explain import EXAMPLE
from ringspan.plans.gather import Gather
from ringspan.plans.hardware import HARDWARE, Hardware, Link, Speed
from ringspan.plans.hardware import hardware as named_hardware
from ringspan.plans.hierarchical import Hierarchical
from ringspan.plans.hybrid import Hybrid
from ringspan.plans.pass_q import PassQ
from ringspan.plans.ring import Ring, block_reach
from ringspan.plans.scene import Scene, needed_rows
from ringspan.plans.shape import Shape, bytes_moved, peak_bytes
from ringspan.plans.ulysses import Ulysses
from ringspan.plans.verify import verify
from ringspan.remember import remember


class Strategy(Protocol):
    """A planner: a frozen dataclass that is called with a scene."""

    def __call__(self, scene: Scene, /) -> Program: ...


STRATEGIES: dict[str, type[Any]] = {
    "ring": Ring,
    "gather": Gather,
    "exchange": Exchange,
    "pass_q": PassQ,
    "ulysses": Ulysses,
    "hierarchical": Hierarchical,
    "hybrid": Hybrid,
}


def register_strategy(name: str, strategy: type[Any]) -> None:
    """Make a planner of your own known by a name: a frozen dataclass whose instances map a Scene to a Program."""
    if not re.fullmatch(r"[a-z]\w*", name) or name == "auto":
        raise PlanError(f"a strategy's name is a lower-case word other than auto, not {name!r}")
    if not is_dataclass(strategy):
        raise PlanError(f"a strategy is a frozen dataclass, whose fields are its options; {strategy!r} is none")
    STRATEGIES[name] = strategy
    _plan_rank.forget()  # plans of another strategy that had this name


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
    ``"auto"`` follows a short rule; with ``hardware`` (a name as ``"h200x8"``, or a :class:`Hardware`) and the ``shape`` of the
    tensors all candidates are costed on that machine instead, and the fastest is taken.

    >>> from ringspan import causal
    >>> plan(causal(16), world=4, rank=1, strategy="ring", layout="zigzag")
    <Plan ... ring on zigzag: rank 1 of 4, 4 queries × 4 keys, area 34, 4 steps>
    """
    if not isinstance(mask, Mask):
        raise PlanError(f"the first argument must be a mask, as from ringspan.causal(n); got {type(mask).__name__}")
    notes: list[str] = []
    given = strategy
    if hardware is not None and "auto" in (layout, strategy):
        choice = best_on(
            mask, world=world, strategy=strategy, layout=layout, kv_layout=kv_layout, hardware=hardware, shape=shape
        )
        layout, strategy = choice.best.layout, choice.best.strategy
        notes = [f"candidate {candidate}" for candidate in choice.candidates]
        notes.append(f"strategy {choice.best.strategy} on layout {choice.best.layout.name}: the fastest candidate")
    q_layout, note = make_layout(layout, mask, world)
    notes += [] if notes else [note]
    if kv_layout is None and mask.lengths[0] == mask.lengths[1]:
        k_layout = q_layout
    else:
        if kv_layout is None:
            kv_layout = layout if isinstance(layout, str) and layout != "auto" else "contiguous"
        k_layout, note = make_layout(kv_layout, mask.transposed, world)
        notes.append(f"kv {note}")
    if strategy == "auto":
        chosen, note = auto(mask, q_layout, k_layout)
        strategy = _spec(chosen)
    else:
        note = f"strategy {_spec(strategy)}: as asked" if strategy == given else ""
        strategy = _spec(strategy)
    notes += [note] if note else []
    checked = _rank(rank, q_layout.world)
    return plan_rank(mask, q_layout, k_layout, strategy, checked, tuple(notes))


def best_on(
    mask: Mask,
    *,
    world: int,
    hardware: str | Hardware,
    shape: Shape | None = None,
    strategy: str | Strategy = "auto",
    layout: LayoutLike = "auto",
    kv_layout: LayoutLike | None = None,
) -> Choice:
    """All candidates on a machine, with what they cost, the best first. What is not ``"auto"`` is taken as given."""
    machine = named_hardware(hardware)
    shape = EXAMPLE if shape is None else shape
    if not isinstance(shape, Shape):
        raise PlanError(f"shape must be a ringspan.Shape, as Shape(heads=32, kv_heads=8, head_dim=128); got {shape!r}")
    layouts = layouts_for(mask, world, machine) if layout == "auto" else [make_layout(layout, mask, world)[0]]
    strategies = strategies_for(world, machine, shape) if strategy == "auto" else [_spec(strategy)]

    def plans_of(one: Layout, way: str) -> list[Plan]:
        first = plan(mask, world=world, strategy=way, layout=one, kv_layout=kv_layout)
        return [first.at(rank) for rank in range(first.world)]

    return choose(mask, layouts, strategies, machine, shape, plans_of)


def plan_rank(mask: Mask, q_layout: Layout, kv_layout: Layout, strategy: str, rank: int, notes: tuple[str, ...] = ()) -> Plan:
    """The plan of one rank with everything chosen. A repeated call is a dictionary look-up."""
    made = _plan_rank(mask, q_layout, kv_layout, strategy, rank, notes)
    # Of masks that say the same one is as good as another, but not their functions: these have tensors, on a device, of today.
    return made if mask.settler is None or made.mask is mask else replace(made, mask=mask)


@remember(512)
def _plan_rank(mask: Mask, q_layout: Layout, kv_layout: Layout, strategy: str, rank: int, notes: tuple[str, ...]) -> Plan:
    scene = Scene(mask=mask, q_layout=q_layout, kv_layout=kv_layout, rank=rank)
    program = parse_strategy(strategy)(scene)
    return Plan(mask=mask, q_layout=q_layout, kv_layout=kv_layout, strategy=strategy, rank=rank, program=program, notes=notes)


def forget() -> None:
    """Empty all caches of planning, for those who measure it."""
    for cache in (_plan_rank, block_reach, named_layout, slot_contents, *scenes.CACHES, *head_split.CACHES):
        cache.forget()


def parse_strategy(text: str) -> Strategy:
    """``"ring"``, ``"gather(stages=4)"``, … as a planner.

    >>> parse_strategy("gather(stages=4)")
    Gather(stages=4)
    """
    match = re.fullmatch(r"\s*(\w+)\s*(\(.*\))?\s*", text)
    if not match or match[1] not in STRATEGIES:
        raise PlanError(f"no strategy is called {text!r}; there are {', '.join(STRATEGIES)} and auto")
    kind = STRATEGIES[match[1]]
    try:
        call = ast.parse(f"f{match[2] or '()'}", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        planner: Strategy = kind(**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
        return planner
    except (SyntaxError, AssertionError, TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        options = ", ".join(f"{f.name}={f.default!r}" for f in fields(kind))
        raise PlanError(f"cannot read strategy {text!r}: {match[1]} takes ({options})") from None


def strategy_for_heads(text: str, heads: int, kv_heads: int) -> str:
    """The strategy with its options ``heads`` and ``kv_heads`` set.

    >>> strategy_for_heads("ulysses", 12, 4)
    'ulysses(heads=12, kv_heads=4)'
    """
    planner: Any = parse_strategy(text)
    if not {"heads", "kv_heads"} <= {f.name for f in fields(planner)}:
        raise PlanError(
            f"strategy {text} splits heads, and has no options heads= and kv_heads= by which it could be told that there are "
            f"{heads} and {kv_heads}"
        )
    return _spec(replace(planner, heads=heads, kv_heads=kv_heads))


def _spec(strategy: str | Strategy) -> str:
    """The strategy as text, with its options spelled out: the form that goes into digests and files."""
    if isinstance(strategy, str):
        strategy = parse_strategy(strategy)
    for name, kind in STRATEGIES.items():
        if type(strategy) is kind:
            options = ", ".join(f"{f.name}={getattr(strategy, f.name)!r}" for f in fields(strategy))  # type: ignore[arg-type]
            return f"{name}({options})" if options else name
    raise PlanError(f"{strategy!r} is not a registered strategy; make it known with ringspan.plans.register_strategy")


def _rank(rank: Any, world: int) -> int:
    try:
        checked = operator.index(rank)
    except TypeError:
        checked = -1
    if not 0 <= checked < world:
        raise PlanError(f"rank must be one of 0 … {world - 1}, not {rank!r}")
    return checked


__all__ = [
    "HARDWARE",
    "STRATEGIES",
    "Candidate",
    "Choice",
    "Cost",
    "Exchange",
    "Gather",
    "Hardware",
    "Hierarchical",
    "Hybrid",
    "Link",
    "PassQ",
    "Plan",
    "Program",
    "Ring",
    "Scene",
    "Shape",
    "Slot",
    "Speed",
    "Step",
    "Strategy",
    "Task",
    "Transfer",
    "Ulysses",
    "best_on",
    "bytes_moved",
    "cost",
    "forget",
    "named_hardware",
    "needed_rows",
    "parse_strategy",
    "peak_bytes",
    "plan",
    "plan_rank",
    "register_strategy",
    "strategy_for_heads",
    "verify",
]
