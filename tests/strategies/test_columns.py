"""The columns of all ranks, against the programs that the same strategy makes: costs are equal to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.costs import HARDWARE, named_hardware
from ringspan.costs.column_cost import cost_of_columns
from ringspan.layouts import LAYOUTS
from ringspan.planner import cost
from ringspan.planner.auto import plans_at, workload_of
from ringspan.plans.data import PHASES, DkvDtype
from ringspan.strategies import arrivals, incoming_rows, parse_strategy
from tests.hypothesis_strategies import Drawn, masks
from tests.plans.machines import COPYING, LAPTOP, SLOW

STRATEGIES = [
    "exchange(stages=1)",
    "exchange(stages=2)",
    "exchange(stages=3)",
    "gather(stages=1)",
    "gather(stages=3)",
    "ring",
    "pass_q(stages=1)",
    "pass_q(stages=2)",
    "pass_q(stages=4)",
    "hierarchical(per_node=2)",
    "hierarchical(per_node=3)",
]
SHAPES = [
    rs.Shape(heads=8, kv_heads=2, head_dim=64),
    rs.Shape(heads=4, kv_heads=4, head_dim=32, v_dim=16, batch=2, dtype="float32"),
]


def check(
    mask: rs.Mask,
    world: int,
    layout: str,
    strategy: str,
    machine: rs.Hardware,
    shape: rs.Shape,
    dkv_dtype: DkvDtype,
) -> None:
    q_layout, kv_layout = LAYOUTS[layout](mask, world), LAYOUTS[layout](mask.transposed, world)
    workload = workload_of(mask, q_layout, kv_layout, machine, shape, world, dkv_dtype)
    columns = parse_strategy(strategy).columns(workload)
    assert columns is not None
    found, expected = cost_of_columns(columns, machine, shape), cost(plans_at(workload, strategy), machine, shape)
    for phase in PHASES:
        for name in ("begin", "computed", "end"):
            a, b = (getattr(getattr(of, phase), name) for of in (found, expected))
            assert np.array_equal(a, b), (phase, name)
    assert (found.peak_bytes, found.memory_bytes) == (expected.peak_bytes, expected.memory_bytes)
    assert (found.ranks, found.world) == (expected.ranks, expected.world)


MACHINES = st.sampled_from([SLOW, LAPTOP, COPYING, *(named_hardware(f"h200x{n}") for n in (1, 2, 3, 8))])
ON = st.sampled_from(["contiguous", "zigzag", "striped", "round_robin", "balanced"])


@given(
    masks(40, leaves=3),
    st.integers(1, 7),
    ON,
    st.sampled_from(STRATEGIES),
    MACHINES,
    st.sampled_from(SHAPES),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_columns_cost_what_programs_cost(
    drawn: Drawn, world: int, layout: str, strategy: str, machine: rs.Hardware, shape: rs.Shape, dkv_dtype: DkvDtype
) -> None:
    check(drawn.mask, world, layout, strategy, machine, shape, dkv_dtype)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["zigzag", "balanced", "per_document"])
def test_columns_of_many_documents_cost_what_programs_cost(layout: str, strategy: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 40).tolist()
    check(rs.documents(lengths), 12, layout, strategy, named_hardware("h200x4"), SHAPES[0], "bfloat16")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("longest", "most"), [(1, 16), (3, 16), (10, 16), (3, 2), (1, 3)])
def test_columns_of_long_and_short_ranges_cost_what_programs_cost(
    longest: int, most: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranges of a message are sent alone, and the others are packed. If too many are long, all are packed."""
    for module in (arrivals, incoming_rows):
        monkeypatch.setattr(module, "LONG_RANGE", longest)
        monkeypatch.setattr(module, "MAX_LONG_RANGES", most)
    rs.clear_caches()
    for seed in range(8):
        lengths = np.random.default_rng(seed).integers(1, 30, 20).tolist()
        check(rs.documents(lengths), 6, "balanced", strategy, named_hardware("h200x3"), SHAPES[1], "float32")
    rs.clear_caches()


def test_pieces_have_no_columns() -> None:
    layout = LAYOUTS["contiguous"](rs.causal(64), 4)
    workload = workload_of(rs.causal(64), layout, layout, replace(HARDWARE["h200"], per_node=2), SHAPES[0], 4)
    assert parse_strategy("hierarchical(per_node=2, pieces=2)").columns(workload) is None
    assert parse_strategy("ulysses(heads=8, kv_heads=2)").columns(workload) is None
