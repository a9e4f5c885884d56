"""Choose layout and strategy for a question, and simulate the choice: on every rank, or on a sample if there are
many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ringspan as rs
from ringspan.cli.progress import Progress
from ringspan.costs import Cost, Hardware
from ringspan.errors import PlanError
from ringspan.layouts import check_world
from ringspan.planner import Candidate, Choice, Plan, best_on, cost, plan_rank
from ringspan.planner.auto import workload_of
from ringspan.planner.candidates import MAX_RANKS_BALANCED
from ringspan.planner.choose import ranks_costed
from ringspan.plans import Shape
from ringspan.strategies import parse_strategy

# A choice is compared with at most so many numbers of ranks. They take about as long as the choice itself; a choice for
# more than MAX_RANKS_SIMULATED ranks, which takes long enough, is compared with few ranks only.
MAX_COMPARED, MAX_RANKS_SIMULATED, FEW_RANKS = 6, 256, 16
# Units of the progress bar, for choosing and again for simulating the choice.
WHOLE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to plan, for which tensors and machine. ``"auto"`` is chosen by the cost model."""

    mask: rs.Mask
    world: int
    machine: Hardware
    shape: Shape
    layout: str = "auto"
    strategy: str = "auto"
    most_ranks: int | None = None
    every_candidate: bool = False
    compare_fewer: bool = False

    def __post_init__(self) -> None:
        check_world(self.world)
        if self.most_ranks is not None and self.most_ranks < 1:
            raise PlanError(f"--cost-ranks must be at least 1 rank, not {self.most_ranks}")
        if self.strategy != "auto":
            parse_strategy(self.strategy)

    @property
    def costed(self) -> int:
        """How many ranks of the choice to simulate: those by which it was chosen, unless a number was given."""
        return min(self.world, self.most_ranks or ranks_costed(self.world))


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerRanks:
    """The fastest plan of any layout and strategy for fewer ranks, or the reason why there is none."""

    world: int
    best: Candidate | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The question, all candidates, and for the best one the plans of the simulated ranks and their cost."""

    question: Question
    choice: Choice
    plans: tuple[Plan, ...]
    cost: Cost
    notes: tuple[str, ...]
    fewer: tuple[FewerRanks, ...]
    """If asked for, the same question for fewer ranks, one rank first."""

    @property
    def best(self) -> Candidate:
        return self.choice.best


def study(question: Question) -> Study:
    """Choose as :func:`ringspan.plan` does, then simulate the ranks of the choice, with a progress bar on stderr."""
    with Progress(2 * WHOLE) as bar:
        choice = best_on(
            question.mask,
            world=question.world,
            hardware=question.machine,
            shape=question.shape,
            strategy=question.strategy,
            layout=question.layout,
            on_progress=lambda share, what: bar.update(round(share * WHOLE), what),
        )
        if question.every_candidate:
            choice = replace(choice, candidates=tuple(_with_cost(candidate, question, bar) for candidate in choice.candidates))
        plans = _plans(choice.best, question, bar)
        simulated = cost(plans, question.machine, question.shape)
        fewer = tuple(_fewer_ranks(world, question, bar) for world in fewer_worlds(question.world) if question.compare_fewer)
        bar.update(2 * WHOLE, f"{len(choice.candidates)} candidates")
    return Study(
        question=question,
        choice=choice,
        plans=tuple(plans),
        cost=simulated,
        notes=tuple(_left_out(question)),
        fewer=fewer,
    )


def fewer_worlds(world: int) -> list[int]:
    """Return the numbers of ranks to compare with: one, and the largest halves that are simulated quickly.

    >>> fewer_worlds(64), fewer_worlds(12), fewer_worlds(4096), fewer_worlds(1)
    ([1, 2, 4, 8, 16, 32], [1, 3, 6], [1, 2, 4, 8, 16], [])
    """
    largest = MAX_RANKS_SIMULATED if world <= MAX_RANKS_SIMULATED else FEW_RANKS
    found = []
    while world > 1:
        world //= 2
        found.append(world)
    quick = [n for n in found if 1 < n <= largest][: MAX_COMPARED - 1]
    return [*found[-1:], *reversed(quick)]


def _fewer_ranks(world: int, question: Question, bar: Progress) -> FewerRanks:
    bar.update(2 * WHOLE, f"{world} ranks, to compare")
    try:
        best = best_on(question.mask, world=world, hardware=question.machine, shape=question.shape).best
    except PlanError as error:  # the sequence may need the memory of more ranks
        return FewerRanks(world=world, best=None, reason=str(error).partition(":")[0])
    return FewerRanks(world=world, best=best)


def _plans(candidate: Candidate, question: Question, bar: Progress) -> list[Plan]:
    """Return the plans of the simulated ranks of a candidate."""
    machine, shape = question.machine, question.shape
    workload = workload_of(question.mask, candidate.layout, candidate.kv_layout, machine, shape, question.costed)
    plans: list[Plan] = []
    for rank in workload.ranks:
        done = WHOLE + WHOLE * len(plans) // len(workload.ranks)
        bar.update(done, f"{candidate.strategy} on {candidate.layout.name}: rank {rank}")
        plan = plan_rank(workload.mask, workload.q_layout, workload.kv_layout, candidate.strategy, rank)
        plans.append(plan.for_heads(shape.heads, shape.kv_heads))
    return plans


def _with_cost(candidate: Candidate, question: Question, bar: Progress) -> Candidate:
    """Return a candidate with its cost, also if it was rejected without one, if it can be planned."""
    if candidate.cost is not None:
        return candidate
    try:
        return replace(candidate, cost=cost(_plans(candidate, question, bar), question.machine, question.shape))
    except PlanError:
        return candidate


def _left_out(question: Question) -> Iterator[str]:
    """Yield notes on candidates that were not tried."""
    if question.world > MAX_RANKS_BALANCED and question.layout == "auto":
        yield (
            f"balanced was not tried: making it takes minutes for more than {MAX_RANKS_BALANCED:,} ranks. "
            "--layout balanced tries it"
        )
