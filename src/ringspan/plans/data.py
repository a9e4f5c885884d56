"""The plan: everything one rank sends, receives and computes, as data.

A rank works on *slots*, arrays of rows (tokens). A query slot holds queries, their partial outputs and their gradients.
A key slot holds keys and values and their gradients. Slot 0 holds the rank's own tokens. A *step* posts its transfers,
computes its tasks while the messages are under way, and ends when they have arrived. What arrives in one step can be
used in the next. (A program may keep several exchanges in flight. Then a step ends when the messages of an earlier step
have arrived.) There are six kinds of payload. Each is applied in one way on arrival:

====== =================================== ==============================================
what   rows of                             on arrival
====== =================================== ==============================================
kv     a key slot                          overwrites the rows
q      a query slot                        overwrites the rows
dout   a query slot's upstream gradient    overwrites the rows
out    a query slot's partial output       is merged into the slot's output by lse
dq     a query slot's gradient             is added to the slot's gradient
dkv    a key slot's gradient               is added to the slot's gradient
====== =================================== ==============================================

Overwriting a row resets its partial output (out 0, lse -inf) and its gradients to zero. Every strategy is written in
these terms: those that move keys, move queries, move some heads of either, or forward rows that came from another rank.

In the backward pass ``q`` are the queries with all that their gradients need: out, lse and the upstream gradients, dout
and dlse. A slot may be *kept*: the backward pass begins with what the forward pass left in it, queries with their out
and lse, or keys. Nothing overwrites these, and only ``dout`` is sent to such queries. All other slots begin empty.

A result can be sent *complete*: the sender has the whole output or gradient of these rows and heads. Then it is copied
on arrival instead. The owner would round it to the dtype of the tensors, so it is rounded before it is sent. The result
is the same to the last bit. In half precision its message is about half as large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from ringspan.errors import PlanError
from ringspan.layouts import Layout
from ringspan.masks import Band, Mask
from ringspan.plans.local_rows import LocalRows
from ringspan.plans.slot_tokens import SlotTokens, own_tokens
from ringspan.torch_private.dynamo import dynamo_constant

P = ParamSpec("P")
T = TypeVar("T")

VERSION = 5
MAX_BANDS_NOT_RAGGED = 4
DERIVED_CACHE_SIZE = 256

PayloadKind = Literal["kv", "q", "dout", "out", "dq", "dkv"]
PAYLOAD_KINDS: tuple[PayloadKind, ...] = ("kv", "q", "dout", "out", "dq", "dkv")
OVERWRITES: tuple[PayloadKind, ...] = ("kv", "q", "dout")
Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
KINDS_OF_PHASE: dict[Phase, tuple[PayloadKind, ...]] = {
    "forward": ("kv", "q", "out"),
    "backward": ("kv", "q", "dout", "dq", "dkv"),
}
Side = Literal["q", "kv"]
DkvDtype = Literal["float32", "bfloat16"]
DKV_DTYPES: tuple[DkvDtype, ...] = ("float32", "bfloat16")
# Gradients are sent in the dtype in which they are accumulated: float32, or float64 for float64 tensors.
AS_ACCUMULATED: DkvDtype = "float32"


def completed_exchanges(step: int, steps: int, in_flight: int) -> range:
    """Return the steps whose messages a rank waits for at the end of a step.

    >>> [list(completed_exchanges(n, 4, in_flight=2)) for n in range(4)]
    [[], [0], [1], [2, 3]]
    """
    oldest = step + 1 - in_flight
    return range(max(0, oldest), steps if step + 1 == steps else max(0, oldest + 1))


def side(what: str) -> Side:
    """Return whether a transfer of this kind belongs to queries or to keys."""
    return "kv" if what in ("kv", "dkv") else "q"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message: these rows (and heads, all if None) of a slot, to or from a peer.

    ``complete``: it is a result, and nothing is added to it at its owner. It is sent in the dtype of the tensors.
    """

    what: PayloadKind
    peer: int
    slot: int
    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, int] | None = None
    complete: bool = False

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.rows)

    @property
    def is_packed(self) -> bool:
        """Whether the message is packed into a buffer.

        One contiguous range of rows with all heads is sent from its slot. An output is always packed: out and lse are
        two tensors in a slot and one message. So is a complete result, which may be in the dtype of the accumulators.
        """
        return len(self.rows) != 1 or self.heads is not None or self.what == "out" or self.complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Attention between a query slot and a key slot.

    ``bands`` are the visible (query row, key row) regions: rectangles, each bounded by up to two diagonals,
    ``lo <= k - q <= hi``. Rows are those of the slots. ``q_tokens`` and ``kv_tokens`` say which tokens and heads the
    slots hold at this step. They are None for slot 0, which always holds the rank's own tokens.
    """

    q_slot: int = 0
    kv_slot: int
    bands: tuple[Band, ...]
    q_tokens: SlotTokens | None = None
    kv_tokens: SlotTokens | None = None

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
    """The capacity of a slot in rows, and its number of heads (None: as many as the tensors have).

    ``kept``: what the slot holds at the end of the forward pass is kept for the backward pass. The output of its
    queries must be complete then: merged from all their keys.
    """

    rows: int
    heads: int | None = None
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a strategy returns: the steps of the forward and the backward pass, and the slots they use.

    ``heads`` are the numbers of query and key heads that the program is for. None: no transfer or slot selects heads,
    so the program works for any number of heads. ``dkv_dtype`` is the dtype of dkv in messages. The planner sets it,
    not the strategy. Gradients are always accumulated in float32 (float64 for float64 tensors); ``AS_ACCUMULATED``
    sends them as they are.

    ``in_flight`` is the number of exchanges that may be in flight at once, the same on all ranks. The messages of a
    step have arrived at the end of that step if it is 1, of the next step if it is 2, and so on. After the last step
    all have arrived::

        in_flight=2      post 0   compute 0            post 1   compute 1   wait for 0   post 2   compute 2   wait for 1   …
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    q_slots: tuple[Slot, ...]
    kv_slots: tuple[Slot, ...]
    heads: tuple[int, int] | None = None
    dkv_dtype: DkvDtype = AS_ACCUMULATED
    in_flight: int = 1

    @property
    def rounds_dkv(self) -> bool:
        """Whether messages of dkv have lower precision than its accumulators."""
        return self.dkv_dtype != AS_ACCUMULATED

    @property
    def approximate_bytes(self) -> int:
        """An estimate of the memory of this program: its bands, transfers and tokens."""
        count = 0
        for step in (*self.forward, *self.backward):
            count += len(step.sends) + len(step.recvs) + 1
            for task in step.tasks:
                count += len(task.bands) + 2
        return 300 * count

    def steps(self, phase: Phase) -> tuple[Step, ...]:
        return self.forward if phase == "forward" else self.backward

    @cached_property
    def moving(self) -> set[tuple[PayloadKind, Phase]]:
        """The kinds of rows that are sent or received in each phase."""
        return {(t.what, p) for p in PHASES for step in self.steps(p) for t in (*step.sends, *step.recvs)}

    @cached_property
    def sent_in_place(self) -> set[tuple[PayloadKind, Phase]]:
        """The kinds of own rows of which any are sent from where they are. They must be contiguous then."""
        sends = ((t, p) for p in PHASES for step in self.steps(p) for t in step.sends)
        return {(t.what, p) for t, p in sends if t.slot == 0 and not t.is_packed}

    @cached_property
    def sent_complete(self) -> set[tuple[PayloadKind, int]]:
        """The results, by kind and slot, of which any rows are sent complete."""
        return {(t.what, t.slot) for p in PHASES for step in self.steps(p) for t in step.sends if t.complete}

    @cached_property
    def own_results_complete(self) -> set[PayloadKind]:
        """The kinds of the rank's own results that other ranks complete: no task computes a part of them here."""
        steps = (*self.forward, *self.backward)
        arriving = {(t.what, t.complete) for step in steps for t in step.recvs if t.slot == 0}
        found: set[PayloadKind] = {what for what, complete in arriving if complete and (what, False) not in arriving}
        tasks = [task for step in steps for task in step.tasks]
        if any(task.q_slot == 0 for task in tasks):
            found -= {"out", "dq"}
        if any(task.kv_slot == 0 for task in tasks):
            found -= {"dkv"}
        return found

    @cached_property
    def keeps_rows(self) -> bool:
        """Whether any slot is kept."""
        return any(slot.kept for slot in (*self.q_slots, *self.kv_slots))

    @cached_property
    def own_rows_read(self) -> set[Side]:
        """Which of the rank's own rows, in slot 0, the backward pass reads: queries, keys. Others need not be saved."""
        found: set[Side] = set()
        for step in self.backward:
            found.update(side(t.what) for t in step.sends if t.slot == 0 and t.what in ("q", "kv"))
            found.update("q" for task in step.tasks if task.q_slot == 0)
            found.update("kv" for task in step.tasks if task.kv_slot == 0)
        return found


@dataclass(frozen=True, kw_only=True)
class RankPlan(LocalRows):
    """One rank's program, and the mask, layouts and strategy it was made from: data only.

    :class:`ringspan.Plan` (planner/plan_class.py) adds the methods that make and verify plans. ``notes`` are the lines
    that ``Plan.explain`` prints about the automatic choice.
    """

    mask: Mask
    q_layout: Layout
    kv_layout: Layout
    strategy: str
    rank: int
    program: Program
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.program, Program):  # a user's own strategy may return anything
            raise PlanError(
                f"strategy {self.strategy} must return a ringspan.plans.Program, but returned {self.program!r}; "
                "see strategies/gather.py for an example"
            )

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of mask, layouts, strategy and dkv_dtype: equal on all ranks.

        The steps are not hashed: mask, layouts and strategy determine them. :meth:`ringspan.Plan.verify` checks that
        the program is correct for this mask, not that it is the one that the strategy makes.
        """
        parts: tuple[object, ...] = (VERSION, self.mask.digest, self.q_layout.digest, self.kv_layout.digest, self.strategy)
        if self.program.rounds_dkv:
            parts += (self.program.dkv_dtype,)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:  # the cache of `derived` is not pickled
        return {name: value for name, value in vars(self).items() if name != "_derived"}

    def derived(self, maker: Callable[Concatenate[Self, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``maker(plan, *args, **kwargs)``, cached on the plan.

        The cache is cleared when it reaches ``DERIVED_CACHE_SIZE`` entries.
        """
        cached, key = self._derived, (maker, args, *kwargs.items())
        try:
            result: T = cached[key]
        except KeyError:
            if len(cached) >= DERIVED_CACHE_SIZE:
                cached.clear()
            result = cached[key] = maker(self, *args, **kwargs)
        return result

    @cached_property
    def area(self) -> int:
        """The number of (query, key) pairs in this rank's forward tasks.

        A pair counts once for each task that computes it, whether for all heads or for a range of them.
        """
        return sum(step.area for step in self.program.forward)

    @cached_property
    def work(self) -> float:
        """This rank's forward work (pairs × fraction of the heads) relative to the mean over ranks: 1.0 is balanced."""
        mean = self.mask.area / self.world
        heads, _ = self.program.heads or (1, 1)
        tasks = [task for step in self.program.forward for task in step.tasks]
        done = sum(task.area * (self.program.q_slots[task.q_slot].heads or heads) / heads for task in tasks)
        return done / mean if mean else 1.0

    @cached_property
    def is_ragged(self) -> bool:
        """Whether the mask has windows or more than ``MAX_BANDS_NOT_RAGGED`` bands.

        Some kernels compute such a mask in one call, others launch once per band.
        """
        return len(self.mask) > MAX_BANDS_NOT_RAGGED or any(band.cut_below for band in self.mask)

    @dynamo_constant
    def call_as_constant(self, function: Callable[Concatenate[Self, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function(plan, *args, **kwargs)``. torch.compile treats it as a constant and does not trace into the
        plan.

        It is a method because before torch 2.12 a function marked in this way cannot be given a plan as an argument.
        """
        return function(self, *args, **kwargs)

    def task_tokens(self, task: Task, of: Side) -> SlotTokens:
        """Return which tokens and heads the query slot or the key slot of a task holds."""
        recorded, layout = (task.q_tokens, self.q_layout) if of == "q" else (task.kv_tokens, self.kv_layout)
        return own_tokens(layout)[self.rank] if recorded is None else recorded

    def transfers(self, phase: Phase, direction: Literal["sends", "recvs"]) -> Iterator[Transfer]:
        for step in self.program.steps(phase):
            yield from step.sends if direction == "sends" else step.recvs

    def __repr__(self) -> str:
        name = f"{type(self).__name__} {self.digest[:8]} {self.strategy} on {self.q_layout.name}"
        return (
            f"<{name}: rank {self.rank} of {self.world}, "
            f"{self.q_rows} queries × {self.kv_rows} keys, area {self.area}, {len(self.program.forward)} steps>"
        )
