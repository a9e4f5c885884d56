"""All candidates for a question, costed: on every rank where there are few, on a sample of them where there are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import ringspan as rs
from ringspan.cli.progress import Progress
from ringspan.errors import PlanError
from ringspan.layouts import Layout, areas, balance, check_world, named_layout
from ringspan.layouts.auto import GOOD_ENOUGH
from ringspan.plans import Candidate, Choice, Cost, Hardware, Plan, Shape, parse_strategy
from ringspan.plans.choose import choose, layouts_for, strategies_for

# A rank may have a message for every other. All ranks are costed while that makes no more messages than this for a candidate.
MOST_MESSAGES = 2**16
FEWEST_RANKS = 16
# With more ranks than these some candidates take minutes to make: others stand in for them, and the notes say so.
MANY_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to plan, for which tensors, on which machine; ``"auto"`` is to be found out."""

    mask: rs.Mask
    world: int
    machine: Hardware
    shape: Shape
    layout: str = "auto"
    strategy: str = "auto"
    most_ranks: int | None = None

    def __post_init__(self) -> None:
        check_world(self.world)
        if self.most_ranks is not None and self.most_ranks < 1:
            raise PlanError(f"--cost-ranks must be at least 1 rank, not {self.most_ranks}")
        if self.strategy != "auto":
            parse_strategy(self.strategy)

    @property
    def costed(self) -> int:
        """How many ranks are to be costed."""
        return min(self.world, self.most_ranks or max(FEWEST_RANKS, MOST_MESSAGES // self.world))


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The question, all candidates, and of the best one the plans of the ranks that were costed."""

    question: Question
    choice: Choice
    plans: tuple[Plan, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        return self.choice.best

    @property
    def cost(self) -> Cost:
        assert self.best.cost is not None  # only what was rejected may be without
        return self.best.cost


def study(question: Question) -> Study:
    """Make the layouts, then plan and cost each with each strategy; a bar on stderr tells how far it is."""
    names = _layout_names(question)
    strategies = _strategies(question)
    total = len(names) * len(strategies) * question.costed
    done = 0
    with Progress(total) as bar:

        def plans_of(layout: Layout, strategy: str) -> list[Plan]:
            nonlocal done
            found = []
            for plan in _plans(question, layout, strategy, sample(question.mask, layout, question.costed)):
                bar.update(done, f"{strategy} on {layout.name}: rank {plan.rank}")
                found.append(plan)
                done += 1
            return found

        layouts = _layouts(question, names, bar)
        choice = choose(question.mask, layouts, strategies, question.machine, question.shape, plans_of)
        best = choice.best
        assert best.cost is not None
        plans = tuple(_plans(question, best.layout, best.strategy, best.cost.ranks))
        bar.update(total, f"{len(choice.candidates)} candidates")
    return Study(question=question, choice=choice, plans=plans, notes=tuple(_left_out(question)))


def sample(mask: rs.Mask, layout: Layout, most: int) -> tuple[int, ...]:
    """At most so many ranks, in order: evenly spaced, and among them the one with the most work and the one with the least.

    >>> sample(rs.causal(64), named_layout("contiguous", rs.causal(64), 16)[0], 4)
    (0, 5, 10, 15)
    """
    if layout.world <= most:
        return tuple(range(layout.world))
    work = areas(mask, layout)
    extremes = dict.fromkeys((int(work.argmax()), int(work.argmin())))
    chosen = set(list(extremes)[:most])
    evenly = np.linspace(0, layout.world - 1, most).round().astype(int).tolist()
    for rank in sorted(evenly, key=lambda rank: min(abs(rank - other) for other in extremes), reverse=True):
        if len(chosen) < most:  # those that lie beside an extreme give way to it
            chosen.add(rank)
    return tuple(sorted(chosen))


def _plans(question: Question, layout: Layout, strategy: str, ranks: Sequence[int]) -> Iterator[Plan]:
    """The plans of these ranks, for the heads there are."""
    first = rs.plan(question.mask, world=question.world, rank=ranks[0], strategy=strategy, layout=layout)
    first = first.for_heads(question.shape.heads, question.shape.kv_heads)
    return (first.at(rank) for rank in ranks)


def _layout_names(question: Question) -> tuple[str, ...]:
    if question.layout != "auto":
        return (question.layout,)
    if question.world <= MANY_RANKS:
        return tuple(layout.name for layout in layouts_for(question.mask, question.world, question.machine))
    quick = ("contiguous", "zigzag")
    uneven = all(balance(question.mask, named_layout(name, question.mask, question.world)[0]) > GOOD_ENOUGH for name in quick)
    return (*quick, "round_robin") if uneven else quick


def _layouts(question: Question, names: Sequence[str], bar: Progress) -> list[Layout]:
    """Those of these names, each once."""
    made: dict[str, Layout] = {}
    for name in names:
        bar.update(0, f"layout {name}")
        layout, _ = named_layout(name, question.mask, question.world)
        made.setdefault(layout.digest, layout)
    return list(made.values())


def _strategies(question: Question) -> list[str]:
    if question.strategy != "auto":
        return [question.strategy]
    return strategies_for(question.world, question.machine, question.shape)


def _left_out(question: Question) -> Iterator[str]:
    """What was not tried, and how to have it tried."""
    if question.world > MANY_RANKS and question.layout == "auto":
        yield f"balanced was not tried: making it takes minutes for more than {MANY_RANKS:,} ranks. --layout balanced does"
