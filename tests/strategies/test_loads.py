"""The lower bound of a strategy's time, against the cost of its plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.costs import HARDWARE, Speed, named_hardware
from ringspan.costs.workload import Workload
from ringspan.layouts import LAYOUTS
from ringspan.planner import cost
from ringspan.planner.auto import plans_at, workload_of
from ringspan.strategies import parse_strategy
from ringspan.strategies.protocol import described
from tests.hypothesis_strategies import Drawn, masks
from tests.plans.machines import COPYING, LAPTOP, SLOW

STRATEGIES = [
    "exchange(stages=1)",
    "exchange(stages=2)",
    "exchange(stages=3)",
    "gather(stages=1)",
    "gather(stages=2)",
    "ring",
    "pass_q(stages=2)",
    "ulysses(heads=8, kv_heads=2)",
    "hierarchical(per_node=2)",
    "hybrid(per_node=2, heads=8, kv_heads=2)",
]
SHAPE = rs.Shape(heads=8, kv_heads=2, head_dim=64)
LARGE = rs.Shape(heads=32, kv_heads=8, head_dim=128)
N = 131072
PACKED = [36000, 2000, 28000, 1072, 48000, 16000]
MASKS = {
    "causal": rs.causal(N),
    "full": rs.full(N),
    "window": rs.causal(N) & rs.window(left=2048),
    "documents": rs.documents(PACKED),
}
# The fraction of a plan's cost that the bound reaches, if compute takes long enough. Merging is not part of the bound.
KNOWN = {"exchange": 0.92, "gather": 0.9, "ring": 0.55, "pass_q": 0.9, "ulysses": 0.7}


def exact(workload: Workload, strategy: str) -> float:
    return cost(plans_at(workload, strategy), workload.machine, workload.shape).seconds


@pytest.mark.parametrize("machine", ["h200x8", "h200x4", "h200x2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
def test_the_bound_is_below_the_cost_and_close_to_it(name: str, strategy: str, machine: str) -> None:
    for layout_name in ("contiguous", "zigzag", "balanced"):
        layout = LAYOUTS[layout_name](MASKS[name], 8)
        workload = workload_of(MASKS[name], layout, layout, named_hardware(machine), LARGE, 8)
        least, taken = parse_strategy(strategy).least_seconds(workload), exact(workload, strategy)
        assert KNOWN.get(strategy.partition("(")[0], 0.0) * taken <= least <= 1.001 * taken, layout_name


RATES = st.integers(1, 1000).map(lambda rate: rate * 1e11)


def machines(speeds: st.SearchStrategy[Speed]) -> st.SearchStrategy[rs.Hardware]:
    """Tiles apart, which round what is computed a little differently before and after tiles are joined."""
    bases = st.sampled_from([SLOW, LAPTOP, COPYING, HARDWARE["h200"]])
    return st.builds(
        lambda base, forward, backward: replace(base, forward=forward, backward=backward, tile=0), bases, speeds, speeds
    )


ANY_SPEED = st.builds(Speed, full=RATES, causal=RATES, window=RATES)
# A triangle that is joined with its complement to a rectangle is not faster for it.
RISING = st.lists(RATES, min_size=3, max_size=3).map(sorted).map(lambda x: Speed(full=x[0], causal=x[1], window=x[2]))
ON = st.sampled_from(["contiguous", "zigzag", "striped", "round_robin", "balanced"])


def check_bound(mask: rs.Mask, layout: str, strategy: str, machine: rs.Hardware) -> None:
    q_layout, kv_layout = LAYOUTS[layout](mask, 4), LAYOUTS[layout](mask.transposed, 4)
    workload, made = workload_of(mask, q_layout, kv_layout, machine, SHAPE, 4), parse_strategy(strategy)
    assert made.least_seconds(workload) <= (1 + 1e-6) * exact(workload, strategy)
    assert made.transfer_seconds(workload) <= (1 + 1e-6) * made.least_seconds(workload)


@given(masks(40, leaves=3), ON, st.sampled_from(STRATEGIES), machines(RISING))
def test_the_bound_holds_for_any_mask_if_bands_with_more_cuts_are_no_slower(
    drawn: Drawn, layout: str, strategy: str, machine: rs.Hardware
) -> None:
    check_bound(drawn.mask, layout, strategy, machine)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(0, 40),
    ON,
    st.sampled_from(STRATEGIES),
    machines(ANY_SPEED),
)
def test_the_bound_holds_for_documents_and_windows_at_any_speeds(
    lengths: list[int], left: int, layout: str, strategy: str, machine: rs.Hardware
) -> None:
    check_bound(rs.documents(lengths) & rs.window(left=left), layout, strategy, machine)


# As one was calibrated: triangles are a little faster than rectangles.
TRIANGLES_FIRST = replace(
    LAPTOP,
    forward=Speed(full=71.81e9, causal=72.91e9, window=31.94e9),
    backward=Speed(full=70.94e9, causal=71.48e9, window=44.95e9),
)


@pytest.mark.parametrize("strategy", ["exchange(stages=1)", "gather(stages=1)"])
def test_a_rectangle_that_joins_a_triangle_counts_at_its_speed(strategy: str) -> None:
    check_bound(rs.causal(65536), "zigzag", strategy, TRIANGLES_FIRST)


def test_a_callable_without_a_description_has_a_bound_of_zero() -> None:
    layout = LAYOUTS["zigzag"](MASKS["causal"], 4)
    workload = workload_of(MASKS["causal"], layout, layout, HARDWARE["h200"], SHAPE, 4)
    assert described(lambda problem: None).least_seconds(workload) == 0.0
