"""All candidates for a question, costed: on every rank where there are few, on a sample of them where there are many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ringspan as rs
from ringspan.cli.progress import Progress
from ringspan.errors import PlanError
from ringspan.layouts import check_world, named_layout
from ringspan.plans import Candidate, Choice, Cost, Hardware, Plan, Shape, parse_strategy, plan_rank
from ringspan.plans.auto import site_of
from ringspan.plans.candidates import MANY_RANKS, layouts_for, strategies_for
from ringspan.plans.choose import choose
from ringspan.plans.registry import spec
from ringspan.plans.site import Site

# A rank may have a message for every other. All ranks are costed while that makes no more messages than this for a candidate.
MOST_MESSAGES = 2**16
FEWEST_RANKS = 16


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
    """Make the layouts, then plan and cost what could be the fastest; a bar on stderr tells how far it is."""
    sites, strategies = _sites(question), _strategies(question)
    total = len(sites) * len(strategies) * question.costed
    done = 0
    with Progress(total) as bar:

        def plans_of(site: Site, strategy: str) -> list[Plan]:
            nonlocal done
            found = []
            for plan in _plans(site, strategy):
                bar.update(done, f"{strategy} on {site.q_layout.name}: rank {plan.rank}")
                found.append(plan)
                done += 1
            return found

        choice = choose(sites, strategies, plans_of)
        best = next(site for site in sites if site.q_layout is choice.best.layout)
        plans = tuple(_plans(best, choice.best.strategy))
        bar.update(total, f"{len(choice.candidates)} candidates")
    return Study(question=question, choice=choice, plans=plans, notes=tuple(_left_out(question)))


def _plans(site: Site, strategy: str) -> Iterator[Plan]:
    """The plans of the ranks that are looked at, for the heads there are."""
    for rank in site.ranks:
        plan = plan_rank(site.mask, site.q_layout, site.kv_layout, strategy, rank)
        yield plan.for_heads(site.shape.heads, site.shape.kv_heads)


def _sites(question: Question) -> list[Site]:
    """One for each layout; the keys lie as the queries do, or one after the other where their number differs."""
    mask, world, machine = question.mask, question.world, question.machine
    if question.layout == "auto":
        layouts = layouts_for(mask, world, machine)
    else:
        layouts = [named_layout(question.layout, mask, world)[0]]
    is_square = mask.lengths[0] == mask.lengths[1]
    of_keys = None if is_square else named_layout("contiguous", mask.transposed, world)[0]
    return [site_of(mask, one, of_keys or one, machine, question.shape, question.costed) for one in layouts]


def _strategies(question: Question) -> list[str]:
    if question.strategy != "auto":
        return [spec(question.strategy)]
    return strategies_for(question.world, question.machine, question.shape)


def _left_out(question: Question) -> Iterator[str]:
    """What was not tried, and how to have it tried."""
    if question.world > MANY_RANKS and question.layout == "auto":
        yield f"balanced was not tried: making it takes minutes for more than {MANY_RANKS:,} ranks. --layout balanced does"
