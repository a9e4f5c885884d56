"""A sample of ranks, and the error of its cost."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import ringspan as rs
from ringspan.costs import HARDWARE
from ringspan.layouts import LAYOUTS, Layout, areas
from ringspan.planner import cost
from ringspan.planner.auto import SAMPLE_SIZE, plans_at, workload_of
from ringspan.planner.samples import sample
from ringspan.plans import needed_rows
from ringspan.strategies import parse_strategy

H200 = HARDWARE["h200"]
SHAPE = rs.Shape(heads=128, kv_heads=8, head_dim=128)
TOKENS_PER_RANK = 2048


def lengths(n: int) -> list[int]:
    """Of documents of log-normal lengths, 3,000 tokens on average."""
    drawn = np.random.default_rng(1).lognormal(7.5, 1.0, n // 500).astype(int) + 1
    whole = drawn[np.cumsum(drawn) < n].tolist()
    return [*whole, n - sum(whole)]


@cache
def case(name: str, world: int) -> tuple[rs.Mask, Layout]:
    n = TOKENS_PER_RANK * world
    mask, layout = {
        "causal": (rs.causal(n), "zigzag"),
        "window": (rs.causal(n) & rs.window(left=4096), "contiguous"),
        "documents": (rs.documents(lengths(n)), "balanced"),
    }[name]
    return mask, LAYOUTS[layout](mask, world)


# How far the seconds of 16 ranks may be from those of all.
STRATEGIES = {
    "exchange(stages=1)": 0.001,
    "exchange(stages=2)": 0.02,
    "hierarchical(per_node=8)": 0.005,
    "hybrid(per_node=8, heads=128, kv_heads=8)": 0.01,
    "ring": 0.001,
    "ulysses(heads=128, kv_heads=8)": 0.001,
}
# A block waits for the slowest rank of a step, which is another one in each step. And the ranks of a node that forward
# rows to others add more messages of gradients than the rest.
FURTHER = {
    ("documents", "ring"): 0.08,
    ("window", "hierarchical(per_node=8)"): 0.04,
    ("documents", "hierarchical(per_node=8)"): 0.03,
}


@pytest.mark.parametrize("world", [64, 128])
@pytest.mark.parametrize("name", ["causal", "window", "documents"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sample_costs_what_all_ranks_cost(name: str, strategy: str, world: int) -> None:
    if name == "documents" and strategy.startswith("ulysses"):
        pytest.skip("thousands of messages a rank: minutes")
    mask, layout = case(name, world)
    every, some = (workload_of(mask, layout, layout, H200, SHAPE, most) for most in (world, SAMPLE_SIZE))
    whole, sampled = (cost(plans_at(workload, strategy), H200, SHAPE) for workload in (every, some))
    assert (whole.is_exact, sampled.is_exact, len(sampled.ranks)) == (True, False, SAMPLE_SIZE)
    within = FURTHER.get((name, strategy), STRATEGIES[strategy])
    assert sampled.seconds == pytest.approx(whole.seconds, rel=within)
    assert parse_strategy(strategy).least_seconds(some) <= 1.001 * sampled.seconds


@pytest.mark.parametrize("most", [1, 2, 5, 39, 40, 99])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_sample_has_the_size_asked_for_the_busiest_rank_and_the_one_that_fetches_most(layout: str, most: int) -> None:
    mask = rs.documents([300, 1000, 11])
    made = LAYOUTS[layout](mask, 40)
    ranks = sample(mask, made, made, rs.costs.named_hardware("h200x40"), most)
    assert len(ranks) == min(most, 40)
    assert sorted(set(ranks)) == list(ranks)
    assert set(ranks) <= set(range(40))
    assert int(areas(mask, made).argmax()) in ranks
    away = needed_rows(mask, made, made) * (1 - np.eye(40, dtype=np.int64))
    assert most == 1 or int(np.maximum(away.sum(axis=0), away.sum(axis=1)).argmax()) in ranks


@pytest.mark.parametrize("seed", [1, 5])
def test_the_chosen_candidate_was_planned_on_every_rank(seed: int) -> None:
    """Of packed documents a few ranks may have to do with the longest, and pass it on: no sample knows them all."""
    share = np.random.default_rng(seed).lognormal(size=200)
    cuts = np.round(np.cumsum(share) / share.sum() * 2**18).astype(int)
    mask, shape = rs.documents(np.diff(cuts, prepend=0)), rs.Shape(heads=64, kv_heads=8, head_dim=128)
    found = rs.best_on(mask, world=40, hardware="h200x8", shape=shape)
    assert found.best.cost is not None
    assert found.best.cost.is_exact
    for candidate in found.candidates:
        plan = rs.plan(mask, world=40, strategy=candidate.strategy, layout=candidate.layout)
        assert found.best.cost.seconds <= 1.02 * plan.cost("h200x8", shape).seconds
