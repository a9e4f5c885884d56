"""Interleave: merge the programs of independent parts of a sequence, with one exchange of each part in flight.

::

    two parts, a and b, laid end to end          post a0   compute a0               messages of a0 are in flight
                                                 post b0   compute b0   wait for a0   while b0 is computed
                                                 post a1   compute a1   wait for b0
                                                 post b1   compute b1   wait for a1
                                                 …

So the messages of a part overlap with the compute of all parts. Each part has a strategy of its own, its tasks are
those that it has alone, and its results are the same bit for bit. Slot 0 has the rank's own rows of all parts, one part
after the other. Each part has other slots of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.errors import PlanError
from ringspan.layouts import Layout
from ringspan.masks import Band, Mask
from ringspan.masks import table as tables
from ringspan.masks.end_to_end import shift
from ringspan.plans.data import Phase, Program, Side, Slot, Step, Task, Transfer, side
from ringspan.plans.problem import Problem
from ringspan.plans.slot_tokens import SlotTokens
from ringspan.strategies.protocol import Strategy, described
from ringspan.strategies.text import parse_strategy, spec, strategy_for_heads, strategy_without_keeping


@dataclass(frozen=True, slots=True)
class Interleave(Strategy):
    """Run the parts of a sequence in turn. Make it with :func:`ringspan.interleave`.

    ``parts`` are the strategies of the parts, and ``starts`` the first query and the first key of each part but the
    first. No query sees a key of another part, and on every rank the tokens of the parts follow each other. ``at`` is
    the deprecated name of ``starts``.
    """

    parts: tuple[str, ...] = ("exchange(stages=1)",)
    starts: tuple[tuple[int, int], ...] = ()
    at: InitVar[tuple[tuple[int, int], ...] | None] = None

    def __post_init__(self, at: tuple[tuple[int, int], ...] | None) -> None:
        if at is not None:
            warnings.warn("interleave(at=...) is now interleave(starts=...)", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "starts", at)
        if not isinstance(self.parts, tuple) or not self.parts or not all(isinstance(part, str) for part in self.parts):
            raise PlanError(f"parts must be a tuple with the strategy of each part, as text; not {self.parts!r}")
        starts = self.starts
        if not isinstance(starts, tuple) or len(starts) != len(self.parts) - 1 or not all(map(_is_pair, starts)):
            raise PlanError(f"starts must have the first query and the first key of each part but the first; not {starts!r}")
        object.__setattr__(self, "parts", tuple(map(spec, self.parts)))

    def __call__(self, problem: Problem) -> Program:
        parts = split(problem.mask, problem.q_layout, problem.kv_layout, self.starts)
        programs = [
            parse_strategy(strategy)(Problem(mask=mask, q_layout=q_layout, kv_layout=kv_layout, rank=problem.rank))
            for strategy, (mask, q_layout, kv_layout) in zip(self.parts, parts, strict=True)
        ]
        rows = [(part.q_layout.counts[problem.rank], part.kv_layout.counts[problem.rank]) for part in parts]
        return _merge(programs, rows, [(0, 0), *self.starts])

    def for_heads(self, heads: int, kv_heads: int) -> Interleave:
        """Return the strategy for these numbers of heads."""
        parts = (
            strategy_for_heads(part, heads, kv_heads) if described(parse_strategy(part)).splits_heads else part
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))

    def without_keeping(self) -> Interleave:
        return replace(self, parts=tuple(map(strategy_without_keeping, self.parts)))

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        return {"parts": [("exchange(stages=2)",), ("ring",)]}


class Part(NamedTuple):
    """A part of the sequence, numbered from 0."""

    mask: Mask
    q_layout: Layout
    kv_layout: Layout


@cache_by_digest(64)
def split(mask: Mask, q_layout: Layout, kv_layout: Layout, starts: tuple[tuple[int, int], ...]) -> tuple[Part, ...]:
    """Split a sequence into independent parts, which begin at these queries and keys."""
    parts, (q_len, k_len) = [], mask.lengths
    for (q0, k0), (q1, k1) in pairwise([(0, 0), *starts, (q_len, k_len)]):
        if not (0 <= q0 <= q1 <= q_len and 0 <= k0 <= k1 <= k_len):
            raise PlanError(
                f"the parts of {mask.name} must follow each other within {q_len} queries and {k_len} keys: {starts}"
            )
        inside = tables.intersect(mask.table, tables.table((q0, q1, k0, k1, -tables.MAX_LENGTH, tables.MAX_LENGTH)))
        of_part = Mask(inside - shift(q0, k0), q1 - q0, k1 - k0, name=f"{mask.name}[{q0}:{q1}]", predicate=None)
        parts.append(Part(of_part, _between(q_layout, q0, q1), _between(kv_layout, k0, k1)))
    if mask.predicate is not None or sum(part.mask.area for part in parts) != mask.area:
        raise PlanError(
            f"{mask.name} does not split into independent parts at {starts}: make the plan of each part, and join them with "
            "rs.interleave"
        )
    _check_order(q_layout, [q for q, _ in starts])
    _check_order(kv_layout, [k for _, k in starts])
    return tuple(parts)


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(type(n) is int for n in given)


def _between(layout: Layout, start: int, stop: int) -> Layout:
    """Return the layout of the tokens from start to stop, numbered from 0."""
    spans = []
    for of_rank in layout.spans:
        tokens = (range(*s)[_index(range(*s), start) : _index(range(*s), stop)] for s in of_rank)
        spans.append([(t.start - start, t.stop - start, t.step) for t in tokens if len(t)])
    return Layout(spans, length=stop - start, name=layout.name)


def _index(tokens: range, token: int) -> int:
    """Return how many tokens of the range lie before this one."""
    return len(range(tokens.start, max(tokens.start, min(tokens.stop, token)), tokens.step))


def _check_order(layout: Layout, cuts: Sequence[int]) -> None:
    for rank in range(layout.world):
        part = np.searchsorted(cuts, layout.positions(rank), side="right")
        if (np.diff(part) < 0).any():
            raise PlanError(f"on rank {rank} of {layout!r}, the tokens of the parts at {cuts} do not follow each other")


def _merge(programs: Sequence[Program], rows: Sequence[tuple[int, int]], tokens: Sequence[tuple[int, int]]) -> Program:
    """Merge programs of one rank. ``rows`` are its own queries and keys of each part; ``tokens`` are the first query
    and key of each part."""
    heads = {program.heads for program in programs if program.heads is not None}
    if len(heads) > 1:
        raise PlanError(f"the parts are for different numbers of heads: {', '.join(map(str, sorted(heads)))}")
    offsets = [
        _Offsets({"q": q, "kv": k}, {"q": q_slots, "kv": kv_slots}, {"q": q_token, "kv": k_token})
        for q, k, q_slots, kv_slots, (q_token, k_token) in zip(
            accumulate((q for q, _ in rows), initial=0),
            accumulate((k for _, k in rows), initial=0),
            accumulate((len(p.q_slots) - 1 for p in programs), initial=0),
            accumulate((len(p.kv_slots) - 1 for p in programs), initial=0),
            tokens,
            strict=False,  # accumulate yields one value more
        )
    ]

    def steps(phase: Phase) -> tuple[Step, ...]:
        count = max(len(program.steps(phase)) for program in programs)
        merged = []
        for n in range(count):
            for program, offset in zip(programs, offsets, strict=True):
                merged += [offset.step(step) for step in program.steps(phase)[n : n + 1]] or [Step()]
        return tuple(merged)

    return Program(
        forward=steps("forward"),
        backward=steps("backward"),
        q_slots=(Slot(rows=sum(q for q, _ in rows)), *(slot for p in programs for slot in p.q_slots[1:])),
        kv_slots=(Slot(rows=sum(k for _, k in rows)), *(slot for p in programs for slot in p.kv_slots[1:])),
        heads=heads.pop() if heads else None,
        in_flight=len(programs) * min(program.in_flight for program in programs),
    )


class _Offsets(NamedTuple):
    """What is added to the numbers of a part: to its own rows, which are in slot 0, to its other slots, and to its
    tokens, each for queries and keys."""

    rows: dict[Side, int]
    slots: dict[Side, int]
    tokens: dict[Side, int]

    def step(self, step: Step) -> Step:
        sends, recvs = (tuple(self._transfer(t) for t in way) for way in (step.sends, step.recvs))
        return Step(sends=sends, recvs=recvs, tasks=tuple(self._task(task) for task in step.tasks))

    def _transfer(self, t: Transfer) -> Transfer:
        of, first = side(t.what), self._first_row(t.slot, side(t.what))
        rows = tuple((start + first, stop + first) for start, stop in t.rows)
        return replace(t, slot=self._slot(t.slot, of), rows=rows)

    def _task(self, task: Task) -> Task:
        offset = shift(self._first_row(task.q_slot, "q"), self._first_row(task.kv_slot, "kv")).tolist()
        return Task(
            q_slot=self._slot(task.q_slot, "q"),
            kv_slot=self._slot(task.kv_slot, "kv"),
            bands=tuple(Band(*(x + d for x, d in zip(band, offset, strict=True))) for band in task.bands),
            q_tokens=self._tokens(task.q_tokens, "q"),
            kv_tokens=self._tokens(task.kv_tokens, "kv"),
        )

    def _first_row(self, slot: int, of: Side) -> int:
        return 0 if slot else self.rows[of]

    def _slot(self, slot: int, of: Side) -> int:
        return slot + self.slots[of] if slot else 0

    def _tokens(self, recorded: SlotTokens | None, of: Side) -> SlotTokens | None:
        if recorded is None:
            return None
        first = self.tokens[of]
        return SlotTokens(recorded.spans + np.array([first, first, 0]), recorded.first_head)
