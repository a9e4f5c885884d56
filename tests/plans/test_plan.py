"""Making plans: the arguments of ``rs.plan``, strategies by name, caches, and the digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

import ringspan as rs
from ringspan.kernels import flex
from ringspan.layouts import Layout
from ringspan.masks import Mask
from ringspan.masks import table as tables
from ringspan.planner import Plan, plan_rank, register_strategy
from ringspan.plans import Problem, Program
from ringspan.strategies import STRATEGIES, parse_strategy, strategy_for_heads
from tests.plans.examples import MASKS, all_plans

CAUSAL = rs.causal(16)


# -- arguments of rs.plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mask": "causal"}, rs.PlanError, "the first argument must be a mask, as from ringspan.causal(n); got str"),
        ({"mask": rs.window(left=3)}, rs.MaskError, "holds at any length and has none of its own"),
        ({"world": 0}, rs.LayoutError, "world must be at least 1 rank, not 0"),
        ({"world": 2.5}, rs.LayoutError, "world must be an integer number of ranks, not 2.5"),
        ({"rank": 4}, rs.PlanError, "rank must be one of 0 … 3, not 4"),
        ({"rank": -1}, rs.PlanError, "rank must be one of 0 … 3, not -1"),
        ({"rank": "0"}, rs.PlanError, "rank must be one of 0 … 3, not '0'"),
        (
            {"strategy": "rings"},
            rs.PlanError,
            f"no strategy is called 'rings' (did you mean ring?); there are {', '.join(STRATEGIES)} and auto",
        ),
        (
            {"strategy": "hybrid(per_node=3)"},
            rs.PlanError,
            "4 ranks are not a multiple of per_node=3: give per_node= one of 1, 2, 4",
        ),
        ({"strategy": object()}, rs.PlanError, "is not a registered strategy; register it with"),
        ({"layout": "zagzig"}, rs.LayoutError, "no layout is called 'zagzig'; there are contiguous, zigzag"),
        ({"layout": [[(0, 16)]]}, rs.LayoutError, "does not fit: the mask has 16 tokens here and the group 4 ranks"),
        ({"layout": [[(0, 8)], [(8, 12)], [], []]}, rs.LayoutError, "token 12 has no owner: the spans hold 12 of 16 tokens"),
        ({"kv_layout": rs.Layout([[(0, 8)]] + [[]] * 3)}, rs.LayoutError, "does not fit"),
        ({"mask": rs.full(4, 8), "layout": "per_document"}, rs.LayoutError, "this mask has 4 and 8 tokens"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        rs.plan(**{"mask": CAUSAL, "world": 4, **arguments})  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_keys_have_the_layout_of_the_queries() -> None:
    plan = rs.plan(CAUSAL, world=4, layout="zigzag")
    assert plan.kv_layout is plan.q_layout


@pytest.mark.parametrize(
    ("layout", "of_keys"), [("zigzag", "zigzag"), ("auto", "contiguous"), ([[(0, 4)], [(4, 8)]], "contiguous")]
)
def test_keys_of_another_length(layout: object, of_keys: str) -> None:
    plan = rs.plan(rs.full(8, 20), world=2, layout=layout)  # type: ignore[arg-type]
    assert (plan.q_layout.length, plan.kv_layout.length) == (8, 20)
    assert plan.kv_layout.name == of_keys
    assert any(note.startswith(f"kv layout {of_keys}") for note in plan.notes)


def test_keys_of_a_layout_of_their_own() -> None:
    plan = rs.plan(CAUSAL, world=4, rank=1, layout="zigzag", kv_layout="striped").verify()
    assert plan.kv_layout.positions(1).tolist() == [1, 5, 9, 13]


def test_layouts_of_all_kinds() -> None:
    spans = [[(8, 16)], [(0, 8)]]
    given = (spans, rs.Layout(spans), lambda mask, world: rs.Layout(spans))
    assert len({rs.plan(CAUSAL, world=2, layout=layout).digest for layout in given}) == 1


def test_properties_of_a_plan() -> None:
    plan = rs.plan(CAUSAL, world=4, rank=1, strategy="ring", layout="zigzag")
    assert (plan.world, plan.q_rows, plan.kv_rows, plan.area) == (4, 4, 4, 34)
    assert repr(plan) == (f"<Plan {plan.digest[:8]} ring on zigzag: rank 1 of 4, 4 queries × 4 keys, area 34, 4 steps>")
    assert sum(plan.at(rank).area for rank in range(4)) == CAUSAL.area
    assert plan.at(1) is plan


# -- strategies by name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("ring", rs.Ring()),
        (" ring ", rs.Ring()),
        ("ring()", rs.Ring()),
        ("gather", rs.Gather(stages=1)),
        ("gather(stages=4)", rs.Gather(stages=4)),
        ("exchange", rs.Exchange(stages=2)),
        ("exchange( stages = 2 )", rs.Exchange(stages=2)),
        ("pass_q", rs.PassQ(stages=2)),
        ("ulysses(heads=12, kv_heads=4)", rs.Ulysses(heads=12, kv_heads=4)),
        ("hierarchical(per_node=2)", rs.Hierarchical(per_node=2)),
        ("hybrid(per_node=2, between='ring')", rs.Hybrid(per_node=2, between="ring")),
    ],
)
def test_strategies_from_text(text: str, strategy: object) -> None:
    assert parse_strategy(text) == strategy
    assert rs.plan(CAUSAL, world=4, strategy=text).digest == rs.plan(CAUSAL, world=4, strategy=strategy).digest  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no strategy is called ''"),
        ("helix", "no strategy is called 'helix'"),
        ("ulysses(heads=6, kv_heads=4)", "heads must be a multiple of kv_heads"),
        ("hybrid(heads=6, kv_heads=4)", "heads must be a multiple of kv_heads"),
        ("ulysses(keep=1)", "keep must be True or False; got 1"),
        ("hybrid(between='gather')", "between must be one of exchange, ring; got 'gather'"),
        ("hybrid(per_node=0)", "per_node must be an integer number of ranks, at least 1; got 0"),
        ("hierarchical(per_node=2.0)", "per_node must be an integer number of ranks, at least 1; got 2.0"),
        ("hierarchical(pieces=0)", "pieces must be an integer of at least 1; got 0"),
        ("hierarchical(per_node=2, pieces=100000000)", "pieces must be at most 64; got 100000000"),
        ("gather(stages=0)", "stages must be an integer of at least 1; got 0"),
        ("gather(stages=1.5)", "stages must be an integer of at least 1; got 1.5"),
        ("exchange(stages='2')", "stages must be an integer of at least 1; got '2'"),
        ("gather(4)", "cannot read strategy 'gather(4)': gather takes (stages=1)"),
        ("gather(steps=4)", "gather takes (stages=1)"),
        ("gather(stages=)", "gather takes (stages=1)"),
        ("gather(stages=open('x'))", "gather takes (stages=1)"),
        ("exchange(**{})", "exchange takes (stages=2)"),
        ("ring(stages=2)", "cannot read strategy 'ring(stages=2)': ring takes no options"),
    ],
)
def test_text_that_is_no_strategy_is_refused(text: str, message: str) -> None:
    with pytest.raises(rs.PlanError) as error:
        parse_strategy(text)
    assert message in str(error.value)


@dataclass(frozen=True)
class Slow:
    """Gather in as many stages as possible: a strategy of a user."""

    stages: int = 7

    def __call__(self, problem: Problem) -> Program:
        return rs.Gather(stages=self.stages)(problem)


@pytest.fixture
def slow() -> Iterator[None]:
    register_strategy("slow", Slow)
    yield
    del STRATEGIES["slow"]


@pytest.mark.usefixtures("slow")
def test_a_strategy_of_your_own() -> None:
    plan = rs.plan(CAUSAL, world=8, strategy="slow").verify()
    assert plan.strategy == "slow(stages=7)"
    assert len(plan.program.forward) == 8
    assert rs.plan(CAUSAL, world=8, strategy=Slow(stages=2)).strategy == "slow(stages=2)"
    assert Plan.from_json(plan.to_json()) == plan


@dataclass(frozen=True)
class Nothing:
    """A strategy that does not return a program."""

    def __call__(self, problem: Problem) -> None:
        return None


def test_a_strategy_that_makes_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "nothing", Nothing)
    with pytest.raises(rs.PlanError, match=r"strategy nothing must return a ringspan.plans.Program, but returned None"):
        rs.plan(CAUSAL, world=2, strategy="nothing")


@pytest.mark.usefixtures("slow")
def test_registering_a_name_again_clears_cached_plans() -> None:
    before = rs.plan(CAUSAL, world=4, strategy="slow(stages=2)")
    register_strategy("slow", rs.Exchange)
    after = rs.plan(CAUSAL, world=4, strategy="slow(stages=2)")
    assert before.program != after.program == rs.plan(CAUSAL, world=4, strategy="exchange(stages=2)").program


def test_registering_a_strategy_keeps_compiled_kernels() -> None:
    before = flex._compiled()
    register_strategy("slow", Slow)
    del STRATEGIES["slow"]
    assert flex._compiled() is before


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("auto", Slow, "a lower-case word other than auto, not 'auto'"),
        ("Slow", Slow, "a lower-case word other than auto, not 'Slow'"),
        ("my ring", Slow, "a lower-case word"),
        ("mine", lambda problem: None, "a strategy is a frozen dataclass"),
    ],
)
def test_registrations_that_are_refused(name: str, strategy: type, message: str) -> None:
    with pytest.raises(rs.PlanError, match=message):
        register_strategy(name, strategy)
    assert name not in STRATEGIES


def test_a_built_in_strategy_is_not_replaced() -> None:
    with pytest.raises(rs.PlanError, match="ring is a strategy of ringspan"):
        register_strategy("ring", Slow)
    assert STRATEGIES["ring"] is rs.Ring


# -- plans for given numbers of heads ----------------------------------------------------------------------------------


def test_a_plan_is_fitted_to_the_heads_of_the_tensors() -> None:
    plan = rs.plan(CAUSAL, world=4, rank=2, strategy="ulysses", layout="zigzag")
    assert plan.program.heads == (32, 8)
    assert plan.for_heads(32, 8) is plan
    fitted = plan.for_heads(6, 2)
    assert (fitted.strategy, fitted.program.heads) == ("ulysses(heads=6, kv_heads=2, keep=True)", (6, 2))
    assert fitted.digest == rs.plan(CAUSAL, world=4, strategy=fitted.strategy, layout="zigzag").digest != plan.digest
    assert fitted.notes[-1] == "strategy ulysses(heads=6, kv_heads=2, keep=True): for the heads of the tensors"
    assert Plan.from_json(fitted.to_json()) == fitted
    assert fitted.verify().at(0).digest == fitted.digest


def test_a_plan_that_splits_no_heads_fits_any() -> None:
    for plan in (rs.plan(CAUSAL, world=4, strategy="exchange"), rs.plan(CAUSAL, world=1, strategy="ulysses")):
        assert plan.program.heads is None
        assert plan.for_heads(6, 2) is plan


def test_a_strategy_without_head_options_cannot_be_fitted() -> None:
    with pytest.raises(rs.PlanError, match="strategy ring splits heads, but has no options heads= and kv_heads="):
        strategy_for_heads("ring", 6, 2)


# -- the digest --------------------------------------------------------------------------------------------------------


def test_the_digest_is_equal_on_all_ranks_and_differs_between_plans() -> None:
    digests = set()
    variants = [
        (mask, layout, strategy)
        for mask in MASKS.values()
        for layout in ("zigzag", "striped")
        for strategy in ("ring", "gather")
    ]
    for mask, layout, strategy in variants:
        of_ranks = {plan.digest for plan in all_plans(mask, 3, strategy, layout)}
        assert len(of_ranks) == 1
        digests |= of_ranks
    # Two layouts of no or of one token may be the same layout.
    alike = sum(
        rs.plan(m, world=3, layout="zigzag").q_layout == rs.plan(m, world=3, layout="striped").q_layout for m in MASKS.values()
    )
    assert len(digests) == len(variants) - 2 * alike
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests)


def test_options_of_a_strategy_are_in_the_digest() -> None:
    texts = ("gather", "gather(stages=1)", "gather(stages=2)", "exchange(stages=2)")
    assert len({rs.plan(CAUSAL, world=4, strategy=text).digest for text in texts}) == 3


# -- caches ------------------------------------------------------------------------------------------------------------


def test_a_repeated_plan_is_the_same_object() -> None:
    plan = rs.plan(CAUSAL, world=4, rank=2, strategy="ring", layout="zigzag")
    arguments = (plan.mask, plan.q_layout, plan.kv_layout, plan.strategy, plan.rank, plan.notes)
    assert plan_rank(*arguments) is plan
    assert rs.plan(rs.causal(16), world=4, rank=2, strategy="ring", layout="zigzag") is plan
    rs.clear_caches()
    again = plan_rank(*arguments)
    assert again is not plan
    assert again == plan


def in_other_bands(mask: Mask) -> Mask:
    """The same pairs as two bands, above and below the middle."""
    n, _ = mask.lengths
    halves = [(tables.intersect(mask.table, tables.table((a, b, 0, n, -n, n)))) for a, b in ((0, n // 2), (n // 2, n))]
    return replace_table(mask, halves)


def replace_table(mask: Mask, parts: list[tables.Table]) -> Mask:
    return Mask(tables.table(*(tuple(row) for part in parts for row in part.tolist())), *mask.lengths, name="in two halves")


@pytest.mark.parametrize("layout", ["zigzag", "per_document"])
def test_a_plan_does_not_depend_on_what_was_planned_before(layout: str) -> None:
    """Otherwise a rank that has planned an equal mask before would disagree with the others."""
    mask = rs.full(16) & rs.window(left=0, right=0)
    for other in (in_other_bands(mask), rs.documents([1] * 16)):
        assert other == mask
        rs.clear_caches()
        alone = rs.plan(other, world=2, layout=layout)
        rs.clear_caches()
        rs.plan(mask, world=2, layout=layout)
        after = rs.plan(other, world=2, layout=layout)
        assert (after.digest, after.mask.name) == (alone.digest, alone.mask.name)
        assert after.q_layout == alone.q_layout


def test_equal_layouts_keep_their_names() -> None:
    one_span, striped = Layout([[(0, 16)]], name="mine"), rs.plan(CAUSAL, world=1, layout="striped")
    assert one_span == striped.q_layout
    assert rs.plan(CAUSAL, world=1, layout=one_span).q_layout.name == "mine"


def test_a_plan_is_frozen() -> None:
    plan = rs.plan(CAUSAL, world=2)
    with pytest.raises(AttributeError):
        plan.rank = 1  # type: ignore[misc]
    assert replace(plan, notes=()).digest == plan.digest
