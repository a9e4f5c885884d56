"""The choice for a machine, against all candidates planned on every rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringspan as rs
from ringspan.costs import HARDWARE, Hardware
from ringspan.layouts import LAYOUTS
from ringspan.planner import best_on, cost
from ringspan.planner import choose as choosing
from ringspan.planner.auto import plans_at, workload_of
from ringspan.planner.candidates import layouts_for, strategies_for
from ringspan.planner.samples import sampled
from ringspan.plans.shape import EXAMPLE
from ringspan.strategies import Strategy
from tests.plans.machines import LAPTOP

STRATEGIES = ["ring", "gather", "gather(stages=3)", "exchange(stages=1)", "exchange(stages=2)", "exchange(stages=3)", "pass_q"]
DOCUMENTS = [36000, 1200, 8000, 16000, 2736, 1600]
MASKS = {
    "causal": rs.causal(65536),
    "full": rs.full(65536),
    "window": rs.causal(65536) & rs.window(left=4096),
    "documents": rs.documents(DOCUMENTS),
    "documents, both ways": rs.documents(DOCUMENTS, causal=False),
}
MACHINES = {"h200x8": HARDWARE["h200"], "h200x2": rs.costs.named_hardware("h200x2"), "laptop": LAPTOP}
SHAPES = [rs.Shape(heads=32, kv_heads=8, head_dim=128), rs.Shape(heads=4, kv_heads=4, head_dim=64, dtype="float32")]
SHAPE = SHAPES[0]


def by_hand(mask: rs.Mask, world: int, machine: Hardware, shape: rs.Shape, strategies: list[str]) -> tuple[float, str]:
    """The fastest of all layouts with all of these strategies, with every rank planned and simulated."""
    plans = {
        f"{strategy} on {layout}": rs.plan(mask, world=world, strategy=strategy, layout=layout)
        for layout, strategy in product(LAYOUTS, [*strategies, f"hierarchical(per_node={machine.per_node})"])
    }
    return min((plan.cost(machine, shape).seconds, name) for name, plan in plans.items())


@pytest.mark.parametrize("shape", SHAPES, ids=["32 heads", "4 heads"])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_no_hand_picked_plan_is_more_than_5_percent_faster(mask: rs.Mask, machine: Hardware, shape: rs.Shape) -> None:
    chosen = best_on(mask, world=4, hardware=machine, shape=shape).best
    assert chosen.cost is not None
    split_heads = ["ulysses", f"hybrid(per_node={min(machine.per_node, 4)})"]
    seconds, fastest = by_hand(mask, 4, machine, shape, [*STRATEGIES, *split_heads])
    assert chosen.cost.seconds <= 1.05 * seconds, f"{fastest} is faster than {chosen}"


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_no_hand_picked_plan_is_faster_on_the_assumed_machine(mask: rs.Mask, world: int) -> None:
    """On the machine that is assumed; splitting heads would be no faster, even if there are as many as is assumed."""
    chosen = rs.plan(mask, world=world)
    assumed = rs.costs.named_hardware("h200x8")
    seconds, fastest = by_hand(mask, world, assumed, EXAMPLE, [*STRATEGIES, "ulysses"])
    assert chosen.cost(assumed).seconds <= 1.05 * seconds, f"{fastest} is faster than {chosen}"


@st.composite
def scaled_masks(draw: st.DrawFn) -> rs.Mask:
    """Documents, with a window or without, or one sequence."""
    lengths = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=16))
    mask = rs.documents([draw(st.sampled_from([1, 7, 64])) * n for n in lengths], causal=draw(st.booleans()))
    return mask & rs.window(left=draw(st.integers(0, 4096))) if draw(st.booleans()) else mask


@settings(max_examples=8)
@given(scaled_masks(), st.sampled_from([3, 6, 18]), st.sampled_from([*MACHINES.values()]), st.sampled_from(SHAPES))
def test_the_choice_is_that_of_all_candidates_planned_on_all_ranks(
    mask: rs.Mask, world: int, machine: Hardware, shape: rs.Shape
) -> None:
    """To within the saving that is too small to plan for."""
    every = {}
    for layout, strategy in product(layouts_for(mask, world, machine, shape), strategies_for(world, machine, shape)):
        plans = plans_at(workload_of(mask, layout, layout, machine, shape, world), strategy)
        every[strategy, layout.name] = cost(plans, machine, shape)
    if all(of.memory_bytes > machine.memory for of in every.values()):
        with pytest.raises(rs.PlanError, match="no candidate fits in the memory"):
            best_on(mask, world=world, hardware=machine, shape=shape)
        return
    chosen = best_on(mask, world=world, hardware=machine, shape=shape).best
    known = every[chosen.strategy, chosen.layout.name]
    assert chosen.cost is not None
    assert (chosen.cost.seconds, chosen.cost.memory_bytes) == (known.seconds, known.memory_bytes)
    fastest, name = min((of.seconds, name) for name, of in every.items() if of.memory_bytes <= machine.memory)
    assert known.seconds * (1 - choosing.MIN_RELATIVE_SAVING) <= fastest * (1 + 1e-5), f"{name} is faster than {chosen}"


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_many_documents_on_many_nodes_are_no_slower_than_balanced_over_nodes(sigma: float) -> None:
    """1,000 documents of log-normal lengths over about a million tokens, on 8 nodes of 8 ranks."""
    drawn = np.random.default_rng(0).lognormal(sigma=sigma, size=1000)
    mask = rs.documents((1 + drawn / drawn.sum() * 2**20).astype(int).tolist())
    chosen, balanced = (best_on(mask, world=64, hardware="h200x8", shape=SHAPE, layout=of).best for of in ("auto", "balanced"))
    assert balanced.layout.name == "balanced(per_node=8)"
    assert chosen.cost is not None
    assert balanced.cost is not None
    assert chosen.cost.is_exact
    assert chosen.cost.seconds <= balanced.cost.seconds / (1 - choosing.MIN_RELATIVE_SAVING)


def test_the_cheapest_that_fits_is_chosen_and_the_others_have_reasons() -> None:
    mask = rs.causal(8192)
    found = best_on(mask, world=4, hardware="h200x8", shape=SHAPE)
    costed = [c for c in found.candidates if c.rejected is None]
    assert [c.cost.seconds for c in costed if c.cost] == sorted(c.cost.seconds for c in costed if c.cost)
    for candidate in costed:
        plan = rs.plan(mask, world=4, strategy=candidate.strategy, layout=candidate.layout)
        again = cost([plan.at(rank) for rank in range(4)], HARDWARE["h200"], SHAPE)
        assert candidate.cost is not None
        assert candidate.cost.seconds == again.seconds
    ruled_out = [c for c in found.candidates if c.rejected]
    assert all("takes at least" in str(c) for c in ruled_out)
    assert {(c.strategy, c.layout.name) for c in ruled_out} >= {("ring", "contiguous"), ("gather(stages=1)", "contiguous")}


def test_candidates_that_do_not_fit_are_rejected() -> None:
    mask = rs.causal(8192)
    best = best_on(mask, world=4, hardware="h200x8", shape=SHAPE).best
    assert best.cost is not None
    small = replace(HARDWARE["h200"], memory=best.cost.memory_bytes - 1)
    fits = best_on(mask, world=4, hardware=small, shape=SHAPE)
    assert fits.best.cost is not None
    assert fits.best.cost.memory_bytes <= small.memory
    assert any("GiB for buffers and the kernel" in (c.rejected or "") and c.strategy == best.strategy for c in fits.candidates)
    with pytest.raises(rs.PlanError, match="no candidate fits in the memory of h200"):
        best_on(mask, world=4, hardware=replace(small, memory=1), shape=SHAPE)


def test_ulysses_is_tried_on_one_layout() -> None:
    found = best_on(rs.causal(512), world=4, hardware="h200x8", shape=rs.Shape(heads=8, kv_heads=4, head_dim=64))
    assert len({c.layout.name for c in found.candidates}) > 1
    assert sum(c.strategy == "ulysses(heads=8, kv_heads=4, keep=True)" for c in found.candidates) == 1


MERGES_AT_ONCE = replace(HARDWARE["h200"], copy_bytes_per_s=float("inf"), copy_launch_s=0.0)
EQUALS: dict[str, tuple[rs.Mask, str | rs.Hardware, int, str, str]] = {
    # with one rank to fetch from, one stage and two are the same
    "stages": (rs.documents([64, 64], causal=False), "h200x8", 8, "contiguous", "exchange(stages=1)"),
    # candidates of equal cost are planned in another order than they are listed
    "communication is hidden": (rs.causal(131072), MERGES_AT_ONCE, 8, "zigzag", "exchange(stages=1)"),
    # with one head, which cannot be split
    "nodes of one": (rs.full(2048), "h200x1", 1, "contiguous", "exchange(stages=1)"),
}


@pytest.mark.parametrize(("mask", "machine", "heads", "layout", "strategy"), EQUALS.values(), ids=EQUALS)
def test_of_those_that_cost_the_same_the_simpler_one_is_taken(
    mask: rs.Mask, machine: str | rs.Hardware, heads: int, layout: str, strategy: str
) -> None:
    found = best_on(mask, world=2, hardware=machine, shape=rs.Shape(heads=heads, kv_heads=heads, head_dim=64, dtype="float32"))
    assert (found.best.layout.name, found.best.strategy) == (layout, strategy)


@pytest.mark.parametrize("last_bit", [-1e-12, 0.0, 1e-12])
def test_sums_that_differ_in_the_last_bit_choose_alike(last_bit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that could take 0.98 s where the best takes 1 s is just worth planning, on every processor."""
    taken = SimpleNamespace(ranks=(0, 1), seconds=1 + last_bit, memory_bytes=0)
    monkeypatch.setattr(choosing, "cost", lambda *_: taken)
    monkeypatch.setattr(choosing, "cost_of_columns", lambda *_: taken)
    monkeypatch.setattr(Strategy, "least_seconds", lambda *_: 0.98)
    layout = LAYOUTS["contiguous"](rs.causal(64), 2)
    workloads = [workload_of(rs.causal(64), layout, layout, HARDWARE["h200"], SHAPE, 2)]
    found = choosing.choose(workloads, ["exchange(stages=1)", "ring"], plans_at)
    assert [c.rejected for c in found.candidates] == [None, None]


@pytest.mark.parametrize("strategy", ["exchange(stages=1)", "hierarchical(per_node=8)"])
def test_a_choice_for_512_ranks_is_exact(strategy: str) -> None:
    mask = rs.documents(1 + np.random.default_rng(0).lognormal(8.0, 1.5, size=200).astype(int))
    best = best_on(mask, world=512, hardware="h200x8", shape=SHAPE, strategy=strategy, layout="contiguous").best
    assert best.cost is not None
    assert best.cost.ranks == tuple(range(512))


def test_all_that_could_be_the_fastest_are_compared_by_the_same_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world of which only a sample is costed. A smaller sample may have missed the slowest ranks of a candidate."""
    monkeypatch.setattr(choosing, "MAX_RANKS_EXACT", 102)
    share = np.random.default_rng(0).lognormal(size=60)
    mask = rs.documents(np.diff(np.round(np.cumsum(share) / share.sum() * 2**19).astype(int), prepend=0))
    mask &= rs.window(left=8192)
    rs.clear_caches()
    found = best_on(mask, world=128, hardware="h200x8", shape=SHAPE)
    rs.clear_caches()
    ranks = sampled(workload_of(mask, found.best.layout, found.best.layout, HARDWARE["h200"], SHAPE, 128), 64).ranks
    assert found.best.cost is not None
    assert found.best.cost.ranks == ranks
    assert {len(c.cost.ranks) for c in found.candidates if c.cost} == {64}


def test_the_table_lines_up() -> None:
    lines = best_on(rs.causal(8192), world=4, hardware="h200x8", shape=SHAPE).table()
    assert lines[0].split("  ")[0] == "strategy"
    layout, rejected = lines[0].index("layout"), lines[0].index("rejected")
    assert all(line[layout - 1] == " " != line[layout] for line in lines)
    assert all(line[rejected - 1 : rejected + 1] in ("", " t") for line in lines[1:])
