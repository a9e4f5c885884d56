"""A layout: which rank owns which tokens. It maps every global token to one (rank, local row)."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, starmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.errors import LayoutError
from ringspan.masks.table import MAX_LENGTH

Ints = NDArray[np.int64]


# Spans are compared in their common step, which must not overflow int64.
LARGEST_STEP = 2**31
# Spans of the common step, into which the spans of a layout are split to compare them.
MAX_SPLIT_SPANS = 2**20
# Strategies compare all pairs of ranks: a ring over 4,096 ranks is planned in 0.6 s and 0.4 GB, over 16,384 in 10 s and
# 4.6 GB.
MAX_WORLD = 2**12


class Span(NamedTuple):
    """The tokens ``range(start, stop, step)``. With steps, a striped layout has one span per rank."""

    start: int
    stop: int
    step: int = 1

    @property
    def size(self) -> int:
        return len(range(*self))

    def __repr__(self) -> str:
        start, stop, step = self
        return f"[{start},{stop})" if step == 1 else f"[{start},{stop}):{step}"


class Pieces(NamedTuple):
    """The spans of a layout as columns: token ``start + i * step`` lies at row ``at + i`` of rank ``owner``."""

    owner: Ints
    start: Ints
    size: Ints
    step: Ints
    at: Ints

    @property
    def extent(self) -> tuple[Ints, Ints]:
        """The first token of each piece, and one past its last."""
        return self.start, self.start + (self.size - 1) * self.step + 1

    def of(self, *ranks: int) -> Pieces:
        theirs = np.isin(self.owner, ranks)
        return Pieces(*(column[theirs] for column in self))


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Layout:
    """An ordered list of spans for each rank. Together they contain every token exactly once.

    >>> Layout([[(0, 2), (6, 8)], [(2, 6)]])
    <Layout spans: 8 tokens over 2 ranks>
    >>> print(Layout([[(0, 2), (6, 8)], [(2, 6)]]).ascii())
    rank 0: [0,2) [6,8)
    rank 1: [2,6)
    """

    spans: tuple[tuple[Span, ...], ...]
    name: str

    def __init__(self, spans: Sequence[Iterable[Sequence[int]]], *, length: int | None = None, name: str = "spans") -> None:
        """``length`` is the length of the sequence. Without it, the sequence ends with the last span."""
        for field, value in (("spans", _checked(spans)), ("name", name)):
            object.__setattr__(self, field, value)  # the dataclass is frozen
        _check_bijection(self.pieces, length)

    @property
    def world(self) -> int:
        return len(self.spans)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens of each rank."""
        p = self.pieces
        return tuple(np.bincount(p.owner, weights=p.size, minlength=self.world).astype(np.int64).tolist())

    @cached_property
    def length(self) -> int:
        return sum(self.counts)

    @cached_property
    def pieces(self) -> Pieces:
        counts = list(map(len, self.spans))
        owner = np.repeat(np.arange(self.world), counts)
        start, stop, step = _columns(self.spans, sum(counts))
        size = (stop - start + step - 1) // step
        before = np.cumsum(size) - size
        first = owner.searchsorted(owner)  # the first span of the same rank
        return Pieces(owner, start, size, step, before - before[first])

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits, equal if and only if the spans are, in the same order."""
        return hashlib.sha256(repr(self.spans).encode()).hexdigest()[:16]

    def renumbered(self, order: Sequence[int], name: str | None = None) -> Layout:
        """Return the layout whose rank i is rank ``order[i]`` of this one.

        >>> print(Layout([[(0, 2)], [(2, 6)]]).renumbered([1, 0]).ascii())
        rank 0: [2,6)
        rank 1: [0,2)
        """
        layout = object.__new__(Layout)
        for field, value in (("spans", tuple(self.spans[rank] for rank in order)), ("name", name or self.name)):
            object.__setattr__(layout, field, value)  # the spans of a layout need no further check
        return layout

    def positions(self, rank: int) -> Ints:
        """Return the global tokens of a rank, in local order.

        >>> Layout([[(0, 2), (6, 8)], [(2, 6)]]).positions(0).tolist()
        [0, 1, 6, 7]
        """
        parts = [np.arange(*s, dtype=np.int64) for s in self.spans[rank]]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def order(self) -> Ints:
        """Return all tokens, rank after rank: ``x[order]`` shards a sequence, ``y[argsort(order)]`` restores it."""
        return np.concatenate([self.positions(rank) for rank in range(self.world)])

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Layout {self.name}: {self.length} tokens over {self.world} rank{'s' * (self.world != 1)}>"

    def ascii(self) -> str:
        """Return the spans as text, one line per rank with its spans."""
        return "\n".join(f"rank {rank}: {' '.join(map(repr, s))}".rstrip() for rank, s in enumerate(self.spans))


def even_cuts(length: int, parts: int) -> list[int]:
    """Return the boundaries of parts whose sizes differ by at most one token.

    >>> even_cuts(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [i * length // parts for i in range(parts + 1)]


def check_world(world: Any) -> int:
    """Return ``world`` as a number of ranks, or raise a :class:`LayoutError`."""
    try:
        n = operator.index(world)
    except TypeError:
        raise LayoutError(f"world must be an integer number of ranks, not {world!r}") from None
    if n < 1:
        raise LayoutError(f"world must be at least 1 rank, not {n}")
    if n > MAX_WORLD:
        raise LayoutError(f"world must be at most {MAX_WORLD:,} ranks, not {n:,}: plan for fewer ranks")
    return n


def _checked(spans: Any) -> tuple[tuple[Span, ...], ...]:
    """Return the given spans, validated, without empty ones."""
    try:
        given = [list(of_rank) for of_rank in islice(spans, MAX_WORLD + 1)]
    except TypeError:
        raise LayoutError(f"a layout is a list of ranks, each a list of spans (start, stop); got {spans!r}") from None
    if not given:
        raise LayoutError("a layout needs at least one rank; got an empty list of ranks")
    if len(given) > MAX_WORLD:
        raise LayoutError(f"a layout has at most {MAX_WORLD:,} ranks; got spans of more: plan for fewer ranks")
    checked = _checked_at_once(given)
    if checked is not None:
        return checked
    one_by_one = ((_span(rank, s) for s in of_rank) for rank, of_rank in enumerate(given))
    return tuple(tuple(s for s in of_rank if s.start < s.stop) for of_rank in one_by_one)


def _checked_at_once(given: list[list[Any]]) -> tuple[tuple[Span, ...], ...] | None:
    """Return the spans if all are valid, not empty, and of Python integers, else None."""
    try:
        spans = tuple(tuple(starmap(Span, of_rank)) for of_rank in given)
        numbers = list(chain.from_iterable(chain.from_iterable(spans)))
        if set(map(type, numbers)) != {int}:
            return None
        start, stop, step = _columns(spans, len(numbers) // 3)
    except (TypeError, OverflowError):
        return None
    is_valid = (start >= 0) & (step >= 1) & (start < stop) & (stop <= MAX_LENGTH) & (step <= LARGEST_STEP)
    return spans if is_valid.all() else None


def _columns(spans: Sequence[Sequence[Span]], count: int) -> tuple[Ints, Ints, Ints]:
    """Return the start, stop and step of each of ``count`` spans."""
    numbers = np.fromiter(chain.from_iterable(chain.from_iterable(spans)), dtype=np.int64, count=3 * count)
    start, stop, step = np.ascontiguousarray(numbers.reshape(-1, 3).T)
    return start, stop, step


def _span(rank: int, given: Sequence[int]) -> Span:
    try:
        span = Span(*map(operator.index, given))
    except TypeError:
        raise LayoutError(
            f"rank {rank}: a span is (start, stop) or (start, stop, step) in whole tokens, not {given!r}"
        ) from None
    if span.start < 0 or span.step < 1 or span.stop < span.start:
        raise LayoutError(f"rank {rank}: span {tuple(span)} must have 0 <= start <= stop and step >= 1")
    if span.stop > MAX_LENGTH or span.step > LARGEST_STEP:
        raise LayoutError(
            f"rank {rank}: span {tuple(span)} must end at token {MAX_LENGTH} or before it, with a step up to {LARGEST_STEP}"
        )
    return span


def _check_bijection(p: Pieces, length: int | None) -> None:
    """Raise unless every token of ``range(length)`` has one owner; without a length, every token up to the last.

    All spans are first split into spans of their common step. Two of these overlap only within one residue class, where
    sorting finds them.
    """
    if _follow_each_other(p, length):
        return
    common = math.lcm(*set(p.step[p.size > 1].tolist()))
    if common > LARGEST_STEP:
        raise LayoutError(f"the steps of these spans have no common step up to {LARGEST_STEP}: use fewer different steps")
    p = p._replace(step=np.where(p.size > 1, p.step, common))
    split = np.minimum(common // p.step, p.size)
    if (parts := int(split.sum())) > MAX_SPLIT_SPANS:
        raise LayoutError(
            f"the spans are compared in their common step {common:,}, as {parts:,} spans of this step; at most "
            f"{MAX_SPLIT_SPANS:,} are possible: use fewer spans, or fewer different steps"
        )
    i = np.repeat(np.arange(len(p.step)), split)
    nth = np.arange(len(i)) - np.repeat(np.cumsum(split) - split, split)
    first = p.start[i] + nth * p.step[i]
    last = p.start[i] + (p.size[i] - 1) * p.step[i]
    last -= (last - first) % common
    residue = first % common
    order = np.lexsort((first, residue))
    i, residue, first, last = i[order], residue[order], first[order], last[order]
    clash = (residue[1:] == residue[:-1]) & (first[1:] <= last[:-1])
    if clash.any():
        where = int(np.flatnonzero(clash)[0])
        a, b, token = int(i[where]), int(i[where + 1]), int(first[where + 1])
        raise LayoutError(
            f"token {token} is owned twice, by rank {p.owner[a]} and by rank {p.owner[b]}: "
            "the spans of a layout must not overlap"
        )
    total, end = int(p.size.sum()), int(last.max()) + 1 if len(last) else 0
    length = end if length is None else length
    if end > length:
        raise LayoutError(f"token {end - 1} has an owner, but the sequence has {length} tokens: its last is {length - 1}")
    if total < length:
        raise LayoutError(
            f"token {_first_without_owner(first, last, common)} has no owner: the spans hold {total} of {length} tokens, "
            "and every token needs exactly one"
        )


def _follow_each_other(p: Pieces, length: int | None) -> bool:
    """Return whether the spans, sorted, are contiguous from token 0 on, to the end of the sequence."""
    if not len(p.start) or (p.step > 1).any():
        return False
    order = np.argsort(p.start)
    start = p.start[order]
    stop = start + p.size[order]
    return start[0] == 0 and bool((start[1:] == stop[:-1]).all()) and length in (None, int(stop[-1]))


def _first_without_owner(first: Ints, last: Ints, common: int) -> int:
    """Return the first token without an owner.

    It is the start of a residue class or one step after a span, and no span begins there. At most as many classes need
    to be tried as there are spans, plus one.
    """
    beginnings = np.arange(min(common, len(first) + 1))
    return int(np.setdiff1d(np.concatenate([beginnings, last + common]), first).min())
