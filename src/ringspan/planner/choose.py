"""Choose layout and strategy for a mask, a model and a machine.

A best-first search with lower bounds over all (layout, strategy) candidates. It finds the fastest candidate that fits
in memory, to within ``MIN_RELATIVE_SAVING`` of the modelled time. The bound from a sample of ranks is approximate, and
so is the final cost in worlds of which only a sample is costed (:func:`ranks_costed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from ringspan.costs.column_cost import cost_of_columns
from ringspan.costs.plan_cost import Cost, cost, rounded
from ringspan.costs.workload import Workload
from ringspan.errors import PlanError
from ringspan.layouts import Layout
from ringspan.planner.samples import sampled
from ringspan.plans.data import RankPlan
from ringspan.strategies.protocol import described
from ringspan.strategies.registry import parse_strategy

# Relative saving below which a candidate is not planned: the cost model is not more accurate than this.
MIN_RELATIVE_SAVING = 0.02
# The number of ranks that are planned first, to estimate the cost of a candidate.
SAMPLE_SIZE = 16
# Up to this many ranks, a candidate is costed on all ranks before it is accepted; above, on a sample.
MAX_RANKS_EXACT = 512
COLUMNS = ("strategy", "layout", "ms", "exposed, ms", "buffers, GiB", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout and a strategy, with their cost if they were planned, and the reason if they were rejected.

    ``layout`` is that of the queries.
    """

    layout: Layout
    kv_layout: Layout
    strategy: str
    cost: Cost | None = None
    rejected: str | None = None

    def __str__(self) -> str:
        parts = [f"rejected: {self.rejected}"] if self.rejected else []
        if self.cost is not None:
            parts.insert(0, f"{_ms(self.cost.seconds)} ms, largest exposed time of a rank {_ms(self.cost.exposed_s)} ms")
        return f"{self.strategy} on {self.layout.name}: {', '.join(parts)}"

    @property
    def row(self) -> tuple[str, ...]:
        """Its row in a table with the columns :data:`COLUMNS`."""
        columns = ("–", "–", "–")
        if self.cost is not None:
            columns = _ms(self.cost.seconds), _ms(self.cost.exposed_s), f"{self.cost.peak_bytes / 2**30:,.2f}"
        return self.strategy, self.layout.name, *columns, self.rejected or ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Choice:
    """All candidates, the chosen one first: those that fit, from the fastest to the slowest; then those that are too
    large, from the smallest; then those that were not planned."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def table(self) -> tuple[str, ...]:
        """Return the candidates as lines of one table, its heading first."""
        rows = [COLUMNS, *(candidate.row for candidate in self.candidates)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = ("<", "<", ">", ">", ">", "<")
        cells = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows]
        return tuple("  ".join(row).rstrip() for row in cells)

    def __str__(self) -> str:
        return "\n".join(self.table())

    def __repr__(self) -> str:
        return f"<Choice of {len(self.candidates)}: {self.best}>"


def ranks_costed(world: int) -> int:
    """Return the number of ranks on which a candidate is costed before it is accepted: all, or a sample of a large
    world. Where each rank has messages for all others, planning one takes a time that grows with the square of the
    world, so the sample shrinks with it.

    >>> ranks_costed(64), ranks_costed(512), ranks_costed(1024), ranks_costed(2048), ranks_costed(2**20)
    (64, 512, 128, 32, 16)
    """
    return min(world, max(SAMPLE_SIZE, MAX_RANKS_EXACT**3 // world**2))


# Called with the fraction of the candidates that are decided, and the candidate that is planned next.
OnProgress = Callable[[float, str], None]


def choose(
    workloads: Sequence[Workload],
    strategies: Sequence[str],
    plans_of: Callable[[Workload, str], Sequence[RankPlan]],
    *,
    may_split_heads: bool = True,
    must_fit: bool = True,
    most_ranks: int | None = None,
    on_progress: OnProgress | None = None,
) -> Choice:
    """Cost every candidate that could be faster than the best so far by more than ``MIN_RELATIVE_SAVING``.

    The result is deterministic: all ranks get the same choice without communication. ``workloads`` has one entry for
    each layout, the simpler first. ``plans_of`` makes the plans of a workload's ranks. Raises :class:`PlanError` if
    ``must_fit`` and no candidate fits in memory. Without ``must_fit`` the candidate that takes the least memory then
    comes first.

    Each iteration takes the candidate with the lowest estimate and refines it: first the compute time of the busiest
    rank, then the time of the messages alone, then the strategy's lower bound, then the plans of a sample of ranks,
    then those of ``most_ranks``, by default :func:`ranks_costed`. So most candidates are never planned. A strategy that
    makes columns is costed on all ranks of the workload without plans.
    """
    queue, found = _first_estimates(workloads, strategies, may_split_heads=may_split_heads)
    fastest = float("inf")
    while queue:
        least_s, order, estimate, workload, strategy = heappop(queue)
        if least_s > (1 - MIN_RELATIVE_SAVING) * fastest:
            saves = f", saves {1 - least_s / fastest:.1%} at most" if least_s < fastest else ""
            why = f"takes at least {_ms(least_s)} ms{saves}"
            found.append(_Decided(least_s, order, _candidate(workload, strategy, rejected=why)))
        elif estimate == Estimate.COMPUTING and (transfers := _transfer_seconds(workload, strategy)) > least_s:
            heappush(queue, _Open(transfers, order, Estimate.TRANSFERS, workload, strategy))
        elif estimate <= Estimate.TRANSFERS:
            closer = described(parse_strategy(strategy)).least_seconds(workload)
            heappush(queue, _Open(rounded(closer), order, Estimate.BOUND, workload, strategy))
        else:
            if on_progress is not None:
                on_progress(len(found) / (len(found) + 1 + len(queue)), f"{strategy} on {workload.q_layout.name}")
            cost_ = _cost(workload, strategy, plans_of, estimate)
            most = ranks_costed(workload.world) if most_ranks is None else min(most_ranks, workload.world)
            if len(cost_.ranks) < most:
                # The time of a sample is used as a lower bound. It is approximate: a peer outside the sample takes the
                # timeline of a sampled rank.
                larger = workload.whole if most == workload.world else sampled(workload, most)
                heappush(queue, _Open(max(least_s, rounded(cost_.seconds)), order, Estimate.SAMPLE, larger, strategy))
                continue
            too_large = _too_large(cost_, workload)
            fastest = fastest if too_large else min(fastest, rounded(cost_.seconds))
            found.append(_Decided(least_s, order, _candidate(workload, strategy, cost=cost_, rejected=too_large)))
    choice = Choice(candidates=tuple(decided.candidate for decided in sorted(found, key=_sort_key)))
    if must_fit and choice.best.rejected:
        why = "; ".join(map(str, choice.candidates))
        raise PlanError(
            f"no candidate fits in the memory of {workloads[0].machine.name}: {why}. "
            "Use more ranks, or a machine with more memory"
        )
    return choice


def _cost(
    workload: Workload, strategy: str, plans_of: Callable[[Workload, str], Sequence[RankPlan]], estimate: Estimate
) -> Cost:
    """Return the cost of a candidate: from the columns of all ranks if the workload has all and the strategy makes
    columns, else from plans, at first those of a sample of ranks."""
    if len(workload.ranks) == workload.world:
        columns = described(parse_strategy(strategy)).columns(workload)
        if columns is not None:
            return cost_of_columns(columns, workload.machine, workload.shape)
    if estimate == Estimate.BOUND and len(workload.ranks) > SAMPLE_SIZE:
        workload = sampled(workload, SAMPLE_SIZE)
    return cost(plans_of(workload, strategy), workload.machine, workload.shape)


def _transfer_seconds(workload: Workload, strategy: str) -> float:
    return rounded(described(parse_strategy(strategy)).transfer_seconds(workload))


def _first_estimates(
    workloads: Sequence[Workload], strategies: Sequence[str], *, may_split_heads: bool
) -> tuple[list[_Open], list[_Decided]]:
    """Return the queue of all candidates by their compute time, and the candidates that are rejected beforehand."""
    queue: list[_Open] = []
    rejected: list[_Decided] = []
    for order, (workload, strategy) in enumerate(product(workloads, strategies)):
        described_strategy = described(parse_strategy(strategy))
        if not described_strategy.depends_on_layout and workload is not workloads[0]:
            continue
        if described_strategy.splits_heads and not may_split_heads:
            why = "needs the number of heads: pass shape="
            rejected.append(_Decided(float("inf"), order, _candidate(workload, strategy, rejected=why)))
        else:
            computing = described_strategy.computing_seconds(workload)
            heappush(queue, _Open(rounded(computing), order, Estimate.COMPUTING, workload, strategy))
    return queue, rejected


class Estimate(IntEnum):
    """The basis of the estimate of a candidate's time, in increasing accuracy."""

    COMPUTING = 0
    TRANSFERS = 1
    BOUND = 2
    SAMPLE = 3


class _Open(NamedTuple):
    """A candidate that is not decided yet: an entry of the queue.

    ``least_s`` is the lower bound of its time so far, approximate after a sample. The queue yields the lowest estimate
    first, of equals the simpler candidate.
    """

    least_s: float
    order: int
    estimate: Estimate
    workload: Workload
    strategy: str


def _candidate(workload: Workload, strategy: str, *, cost: Cost | None = None, rejected: str | None) -> Candidate:
    return Candidate(layout=workload.q_layout, kv_layout=workload.kv_layout, strategy=strategy, cost=cost, rejected=rejected)


class _Decided(NamedTuple):
    """A candidate, its last estimate in seconds, and its index among all candidates."""

    least_s: float
    order: int
    candidate: Candidate


def _sort_key(decided: _Decided) -> tuple[float, ...]:
    """Order candidates: those that fit by time, then those that do not fit by memory, then those that were not planned
    by their lower bound. Of equals the simpler comes first, in whatever order they were planned."""
    cost_ = decided.candidate.cost
    if cost_ is None:
        return 2, decided.least_s, decided.order
    if decided.candidate.rejected:
        return 1, cost_.memory_bytes, rounded(cost_.seconds), decided.order
    return 0, rounded(cost_.seconds), decided.order


def _too_large(cost_: Cost, workload: Workload) -> str | None:
    if cost_.memory_bytes <= workload.machine.memory:
        return None
    needed, there = cost_.memory_bytes / 2**30, workload.machine.memory / 2**30
    return f"needs {needed:,.1f} GiB for buffers and the kernel, the device has {there:,.1f} GiB"


def _ms(seconds: float) -> str:
    """
    >>> _ms(0.00123456), _ms(1.6189)
    ('1.23', '1,619')
    """
    ms = seconds * 1e3
    return f"{ms:,.3g}" if ms < 999.5 else f"{ms:,.0f}"
