"""One class and one registration: a strategy defined here takes part in everything that the built-in ones do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import ringspan as rs
from ringspan.costs import HARDWARE, Hardware
from ringspan.costs.timeline import Loads, without_messages
from ringspan.costs.workload import Workload
from ringspan.planner import best_on, register_strategy
from ringspan.planner.auto import plans_at, workload_of
from ringspan.plans import Problem, Program
from ringspan.plans.data import PHASES, Phase
from ringspan.plans.moving_side import KEYS
from ringspan.strategies import STRATEGIES, Gather, Strategy, Ulysses
from ringspan.testing import fuzz
from ringspan.testing.check import run_local

CAUSAL = rs.causal(64)
SHAPE = rs.Shape(heads=8, kv_heads=4, head_dim=64)


@dataclass(frozen=True, slots=True)
class OneByOne(Strategy):
    """Receive the keys of ``at_once`` ranks in each stage."""

    at_once: int = 1

    moving_side = KEYS

    def __call__(self, problem: Problem) -> Program:
        return Gather(stages=max(1, (problem.world - 1) // self.at_once))(problem)

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        seconds = workload.demand(KEYS).seconds
        return {phase: without_messages(seconds[phase].sum(axis=1, keepdims=True)) for phase in PHASES}

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: rs.Shape) -> Sequence[Strategy]:
        return [cls(at_once=2)] if world > 2 else []

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        return {"at_once": (1, 2, 3)}


@dataclass(frozen=True, slots=True)
class Minimal(Strategy):
    """Defines only ``__call__``."""

    def __call__(self, problem: Problem) -> Program:
        return Gather()(problem)


@dataclass(frozen=True, slots=True)
class KeepsRows(Strategy):
    """Keeps rows in any case, also in what it returns for compiled code."""

    renamed: bool = False

    def __call__(self, problem: Problem) -> Program:
        return Ulysses(heads=4, kv_heads=2)(problem)

    def without_keeping(self) -> Strategy:
        return KeepsRows(renamed=True)


@pytest.fixture
def keeps_rows() -> Iterator[None]:
    register_strategy("keeps_rows", KeepsRows)
    yield
    del STRATEGIES["keeps_rows"]
    rs.clear_caches()


@pytest.fixture
def one_by_one() -> Iterator[None]:
    register_strategy("one_by_one", OneByOne)
    yield
    del STRATEGIES["one_by_one"]
    rs.clear_caches()


@pytest.fixture
def alone(one_by_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other strategies offer no candidates, so that this one is the best."""
    for kind in STRATEGIES.values():
        if kind is not OneByOne:
            monkeypatch.setattr(kind, "candidates", classmethod(lambda *_: ()))
    rs.clear_caches()


@pytest.mark.usefixtures("one_by_one")
def test_it_is_planned_and_verified() -> None:
    plan = rs.plan(CAUSAL, world=4, rank=1, strategy="one_by_one(at_once=1)", layout="zigzag").verify()
    assert plan.strategy == "one_by_one(at_once=1)"
    assert len(plan.program.forward) == 4
    assert rs.plan(CAUSAL, world=4, rank=1, strategy=OneByOne(), layout="zigzag") == plan


@pytest.mark.usefixtures("one_by_one")
def test_it_is_explained_and_costed() -> None:
    plan = rs.plan(CAUSAL, world=4, strategy="one_by_one", layout="zigzag")
    assert "strategy one_by_one(at_once=1): as given" in plan.explain(SHAPE)
    assert plan.cost("h200x8", SHAPE).seconds > 0


@pytest.mark.usefixtures("one_by_one")
def test_it_is_a_candidate_of_the_automatic_choice() -> None:
    found = best_on(CAUSAL, world=4, hardware="h200x8", shape=SHAPE)
    assert {c.strategy.partition("(")[0] for c in found.candidates} >= {"one_by_one", "exchange", "ring"}
    assert "one_by_one" not in str(best_on(CAUSAL, world=2, hardware="h200x8", shape=SHAPE))


@pytest.mark.usefixtures("keeps_rows")
@pytest.mark.parametrize("renamed", [False, True])
def test_rows_that_are_kept_in_any_case_are_refused_in_compiled_code(renamed: bool) -> None:
    plan = rs.plan(CAUSAL, world=2, strategy=KeepsRows(renamed), layout="contiguous")
    with pytest.raises(rs.PlanError, match=r"strategy keeps_rows\(renamed=True\) keeps rows .* without_keeping\(\)"):
        plan.without_keeping()


@pytest.mark.usefixtures("alone")
def test_it_is_chosen_when_it_is_the_best() -> None:
    plan = rs.plan(CAUSAL, world=4, hardware="h200x8", shape=SHAPE).verify()
    assert plan.strategy == "one_by_one(at_once=2)"
    assert plan.notes[0].startswith("one_by_one(at_once=2) on ")


@pytest.mark.usefixtures("one_by_one")
def test_its_bound_is_no_more_than_its_cost() -> None:
    layout = rs.plan(CAUSAL, world=4, layout="zigzag").q_layout
    workload = workload_of(CAUSAL, layout, layout, HARDWARE["h200"], SHAPE, 4)
    plans = plans_at(workload, "one_by_one(at_once=1)")
    assert 0 < OneByOne().least_seconds(workload) <= rs.planner.cost(plans, HARDWARE["h200"], SHAPE).seconds
    assert OneByOne().computing_seconds(workload) > 0


@pytest.mark.usefixtures("one_by_one")
def test_it_is_saved_and_loaded() -> None:
    plan = rs.plan(CAUSAL, world=4, rank=2, strategy="one_by_one(at_once=3)", layout="zigzag")
    back = rs.Plan.from_json(plan.to_json())
    assert back == plan
    assert back.verify().at(0).strategy == "one_by_one(at_once=3)"


def test_a_file_of_a_strategy_that_is_not_registered_names_it(one_by_one: None) -> None:
    """A file never imports code: its program is read as data, and only the registry makes the other ranks' programs."""
    text = rs.plan(CAUSAL, world=2, strategy="one_by_one", layout="zigzag").to_json()
    kind = STRATEGIES.pop("one_by_one")
    rs.clear_caches()
    try:
        with pytest.raises(rs.PlanError, match=r"no strategy is called 'one_by_one\(at_once=1\)'"):
            rs.Plan.from_json(text)
        back = rs.Plan.from_json(text, trust=True)
        assert len(back.program.forward) == 2
        with pytest.raises(rs.PlanError, match=r"no strategy is called 'one_by_one\(at_once=1\)'"):
            back.verify()
    finally:
        STRATEGIES["one_by_one"] = kind


@pytest.mark.usefixtures("one_by_one")
def test_the_fuzz_draws_it_with_its_options() -> None:
    drawn = [case for case in (fuzz.draw(1, index, world=4) for index in range(150)) if case.strategy.startswith("one_by_one")]
    assert {case.strategy for case in drawn} >= {"one_by_one", "one_by_one(at_once=3)"}
    outcome = run_local(replace(drawn[0], dtype="float64"))
    assert not outcome.problems


def test_the_defaults_of_a_minimal_strategy() -> None:
    layout = rs.plan(CAUSAL, world=4, layout="zigzag").q_layout
    workload = workload_of(CAUSAL, layout, layout, HARDWARE["h200"], SHAPE, 4)
    assert Minimal().least_seconds(workload) == Minimal().computing_seconds(workload) == 0.0
    assert not Minimal.candidates(4, HARDWARE["h200"], SHAPE)
    assert not Minimal.example_options(4)
    assert np.array_equal(without_messages(np.ones((2, 1))).communication, np.zeros((2, 1)))


def test_a_strategy_without_a_program_is_abstract() -> None:
    @dataclass(frozen=True)
    class Nothing(Strategy):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()  # type: ignore[abstract]


def test_deep_nesting_in_the_text_of_a_strategy_is_a_plan_error() -> None:
    with pytest.raises(rs.PlanError, match="cannot read strategy"):
        rs.plan(CAUSAL, world=4, strategy=f"ulysses(heads={'-' * 20_000}1)")
