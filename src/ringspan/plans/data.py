"""The plan: everything one rank sends, receives and computes, as data.

A rank works on *slots*, arrays of rows (tokens). Query slots hold queries and, beside them, the partial results and
gradients of those queries; key slots hold keys and values and, beside them, their gradients. Slot 0 is home: the rank's
own tokens. A *step* posts its transfers, computes its tasks while they travel, and ends when they have arrived; what
arrives in one step is there for the next. Five things travel, and what happens on arrival belongs to the thing:

====== =================================== =========================
what   rows of                             on arrival
====== =================================== =========================
kv     a key slot                          overwrites
q      a query slot                        overwrites
out    a query slot's partial result       is merged into the slot's
dq     a query slot's gradient             is added to the slot's
dkv    a key slot's gradient               is added to the slot's
====== =================================== =========================

Rows overwritten start with an empty result and a zero gradient. That is the whole machine. Moving keys, moving queries, moving
some heads of either, handing on what came from elsewhere: every strategy is said with these words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from ringspan.errors import PlanError
from ringspan.layouts import Layout
from ringspan.masks import Band, Mask
from ringspan.torch_private.dynamo import dynamo_constant

if TYPE_CHECKING:
    from ringspan.costs.cost import Cost
    from ringspan.costs.hardware import Hardware
    from ringspan.plans.shape import Shape

P = ParamSpec("P")
T = TypeVar("T")

VERSION = 2
FEW = 4  # bands
MOST_DERIVED = 256

What = Literal["kv", "q", "out", "dq", "dkv"]
WHATS: tuple[What, ...] = ("kv", "q", "out", "dq", "dkv")
Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
Side = Literal["q", "kv"]


def side(what: str) -> Side:
    """Whether it is of queries or of keys."""
    return "kv" if what in ("kv", "dkv") else "q"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message: these rows (and heads, all if None) of a slot, to or from a peer."""

    what: What
    peer: int
    slot: int
    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Attend from a query slot to a key slot, through bands in the slots' rows."""

    q_slot: int = 0
    kv_slot: int
    bands: tuple[Band, ...]

    @property
    def area(self) -> int:
        return sum(band.area for band in self.bands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Post the transfers, compute the tasks, wait for the transfers."""

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()
    tasks: tuple[Task, ...] = ()

    @property
    def area(self) -> int:
        return sum(task.area for task in self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """How many rows a slot has room for, and how many heads (None: as many as the tensors have)."""

    rows: int
    heads: int | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a strategy makes: the steps of both directions and the slots they use.

    ``heads`` is how many query and key heads there must be; None, if the program names no heads and fits any number.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    q_slots: tuple[Slot, ...]
    kv_slots: tuple[Slot, ...]
    heads: tuple[int, int] | None = None

    def steps(self, phase: Phase) -> tuple[Step, ...]:
        return self.forward if phase == "forward" else self.backward

    def moves_queries(self, phase: Phase) -> bool:
        """Whether any query leaves or enters. If none does, the rank's own need not be copied to lie row by row."""
        return phase in self._moving

    @cached_property
    def _moving(self) -> set[Phase]:
        return {p for p in PHASES for step in self.steps(p) for t in (*step.sends, *step.recvs) if t.what == "q"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One rank's program, with the mask, layouts and strategy it follows from.

    Make one with :func:`ringspan.plan`; no process group is needed. ``notes`` say what was chosen for you and why.
    """

    mask: Mask
    q_layout: Layout
    kv_layout: Layout
    strategy: str
    rank: int
    program: Program
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.program, Program):  # a strategy may be a user's own
            raise PlanError(
                f"strategy {self.strategy} must make a ringspan.plans.Program of a Scene, and returned {self.program!r}: see "
                "plans/gather.py for one that does"
            )

    @property
    def world(self) -> int:
        return self.q_layout.world

    @property
    def q_rows(self) -> int:
        """How many queries this rank owns."""
        return self.q_layout.counts[self.rank]

    @property
    def kv_rows(self) -> int:
        """How many keys this rank owns."""
        return self.kv_layout.counts[self.rank]

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of what the plan follows from, equal on all ranks. That a program is the one that follows is for
        :meth:`verify` to say."""
        parts = (VERSION, self.mask.digest, self.q_layout.digest, self.kv_layout.digest, self.strategy)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:  # a plan is data, and may be sent to another process; what hangs on it is not
        return {name: value for name, value in vars(self).items() if name != "_derived"}

    def derived(self, maker: Callable[Concatenate[Plan, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``maker`` makes of the plan and of what else it is given: worked out once, and kept as long as the plan."""
        known, key = self._derived, (maker, args, *kwargs.items())
        try:
            result: T = known[key]
        except KeyError:
            if len(known) >= MOST_DERIVED:
                known.clear()
            result = known[key] = maker(self, *args, **kwargs)
        return result

    @cached_property
    def area(self) -> int:
        """How many (query, key) pairs this rank computes in the forward pass, be it for all heads or for some."""
        return sum(step.area for step in self.program.forward)

    @cached_property
    def work(self) -> float:
        """What this rank computes in the forward pass, over the mean of all ranks."""
        mean = self.mask.area / self.world
        heads, _ = self.program.heads or (1, 1)
        tasks = [task for step in self.program.forward for task in step.tasks]
        done = sum(task.area * (self.program.q_slots[task.q_slot].heads or heads) / heads for task in tasks)
        return done / mean if mean else 1.0

    def for_heads(self, heads: int, kv_heads: int) -> Plan:
        """The plan for tensors of so many heads: this one, unless it splits heads and was made for other numbers of them."""
        from ringspan.strategies import plan_rank, strategy_for_heads

        if self.program.heads in (None, (heads, kv_heads)):
            return self
        strategy = strategy_for_heads(self.strategy, heads, kv_heads)
        notes = (*self.notes, f"strategy {strategy}: for the heads of the tensors")
        return plan_rank(self.mask, self.q_layout, self.kv_layout, strategy, self.rank, notes)

    @cached_property
    def is_ragged(self) -> bool:
        """Whether the mask has windows, or more than a few bands: what some kernels serve in one call and some in many."""
        return len(self.mask) > FEW or any(band.cut_below for band in self.mask)

    @dynamo_constant
    def given_to(self, taker: Callable[Concatenate[Plan, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``taker`` makes of the plan: how a compiler that is not to look into plans gets at it. It can be told to take a
        method's result as it is; to a function it cannot hand a plan for that, before torch 2.12."""
        return taker(self, *args, **kwargs)

    def transfers(self, phase: Phase, way: Literal["sends", "recvs"]) -> Iterator[Transfer]:
        for step in self.program.steps(phase):
            yield from step.sends if way == "sends" else step.recvs

    def at(self, rank: int) -> Plan:
        """The plan of another rank of the same world."""
        from ringspan.strategies import plan_rank

        if rank == self.rank:
            return self
        return plan_rank(self.mask, self.q_layout, self.kv_layout, self.strategy, rank, self.notes)

    def verify(self) -> Plan:
        """Prove from the data of all ranks that every visible pair is computed exactly once, that sends match receives, that
        nothing is read before it is there or overwritten while in use, and that every partial result and gradient gets home.

        Raises :class:`~ringspan.errors.PlanError` naming rank and step; returns the plan itself if all is well.
        """
        from ringspan.plans.verify import verify

        verify([self.at(rank) for rank in range(self.world)])
        return self

    def explain(self, shape: Shape | None = None) -> str:
        """What this rank does, step by step, with bytes for tensors of the given shape."""
        from ringspan.plans.explain import explain

        return explain(self, shape)

    def cost(self, hardware: str | Hardware, shape: Shape | None = None) -> Cost:
        """What the plans of all ranks take on a machine: seconds, exposed wire, memory, and who does what when."""
        from ringspan.costs import named_hardware
        from ringspan.costs.cost import cost
        from ringspan.plans.shape import EXAMPLE, check_shape

        shape = EXAMPLE if shape is None else check_shape(shape)
        return cost([self.at(rank) for rank in range(self.world)], named_hardware(hardware), shape)

    def to_json(self) -> str:
        from ringspan.plans.files import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """A plan back from :meth:`to_json`.

        A malformed one raises :class:`~ringspan.errors.PlanError` with the field's name.
        """
        from ringspan.plans.files import from_json

        return from_json(text)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.digest[:8]} {self.strategy} on {self.q_layout.name}: rank {self.rank} of {self.world}, "
            f"{self.q_rows} queries × {self.kv_rows} keys, area {self.area}, {len(self.program.forward)} steps>"
        )
