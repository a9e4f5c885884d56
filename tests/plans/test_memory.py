"""``memory_bytes`` against the measured memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ringspan as rs
from ringspan.bench.rank import MASKS
from ringspan.costs import HARDWARE, plan_cost
from ringspan.planner import memory_bytes, peak_bytes
from ringspan.plans import explain, memory
from ringspan.plans import shape as shapes
from ringspan.plans.data import PHASES

SHAPE = rs.Shape(heads=32, kv_heads=8, head_dim=128)

# MiB beside the inputs, of the rank of 8 that used the most: `ringspan bench rank` with FlashAttention-4 on an H200.
HELD = {
    ("causal", 65536, "zigzag", "exchange(stages=1)"): 1476,
    ("causal", 65536, "zigzag", "exchange(stages=2)"): 1236,
    ("causal", 65536, "zigzag", "gather"): 1524,
    ("causal", 131072, "zigzag", "exchange(stages=1)"): 2952,
    ("causal", 131072, "zigzag", "exchange(stages=2)"): 2472,
    ("causal", 131072, "zigzag", "gather"): 3048,
    ("window", 131072, "contiguous", "exchange(stages=1)"): 600,
    ("documents", 131072, "balanced", "exchange(stages=2)"): 811,
    ("documents", 131072, "round_robin", "exchange(stages=1)"): 2162,
}


@pytest.mark.parametrize(("case", "held"), HELD.items(), ids=map(str, HELD))
def test_a_device_holds_no_more_than_planned(case: tuple[str, int, str, str], held: int) -> None:
    mask, tokens, layout, strategy = case
    first = rs.plan(MASKS[mask](tokens, 4096), world=8, layout=layout, strategy=strategy)
    plans = [first.at(rank) for rank in range(8)]
    planned = max(memory_bytes(plan, SHAPE, phase) for plan in plans for phase in PHASES) / 2**20
    assert planned >= held
    if mask == "causal":  # where every buffer is used, and all at once
        assert planned <= 1.2 * held


def test_forward_a_kernel_takes_its_results() -> None:
    (plan,) = rs.LocalWorld(1).plans(rs.causal(64))
    shape = rs.Shape(heads=4, kv_heads=2, head_dim=8, v_dim=16, batch=3, dtype="bfloat16")
    of_kernel = memory_bytes(plan, shape, "forward") - peak_bytes(plan, shape, "forward")
    assert of_kernel == 3 * 64 * 4 * (16 * 2 + 4)


@pytest.mark.parametrize(("kv_heads", "sums"), [(4, 0), (2, 4)])
def test_backward_a_kernel_takes_its_gradients_and_sums(kv_heads: int, sums: int) -> None:
    (plan,) = rs.LocalWorld(1).plans(rs.causal(64))
    shape = rs.Shape(heads=4, kv_heads=kv_heads, head_dim=8, dtype="float16")
    of_kernel = memory_bytes(plan, shape, "backward") - peak_bytes(plan, shape, "backward")
    assert of_kernel == 64 * 4 * (8 * (2 + 4) + 8) + 64 * kv_heads * 16 * (2 + sums)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 0), ("bfloat16", 16 * 2 + 4)])
def test_partial_results_in_half_precision_are_counted(dtype: str, width: int) -> None:
    """Where a rank's queries have more than one task: one result for each query and head."""
    shape = rs.Shape(heads=4, kv_heads=2, head_dim=8, v_dim=16, dtype=dtype)  # type: ignore[arg-type]
    plan = rs.plan(rs.full(64), world=2, rank=0, layout="contiguous", strategy="gather")
    kernel = 32 * 4 * (16 * shape.item + 4)
    assert memory_bytes(plan, shape, "forward") - peak_bytes(plan, shape, "forward") == kernel + 32 * 4 * width


@pytest.mark.parametrize(
    "figure",
    [
        lambda plan, shape: memory.memory_bytes(plan, shape, "forward"),
        lambda plan, shape: shapes.bytes_moved(plan, shape, "forward"),
        explain.explain,
        lambda plan, shape: plan_cost.cost([plan, plan.at(1)], HARDWARE["h200"], shape),
    ],
    ids=["memory_bytes", "bytes_moved", "explain", "cost"],
)
def test_figures_of_other_numbers_of_heads_are_refused(figure: Callable[[rs.Plan, rs.Shape], object]) -> None:
    plan = rs.plan(rs.causal(16), world=2, strategy="ulysses(heads=8, kv_heads=4)")
    with pytest.raises(rs.PlanError, match=r"is for 8 query heads and 4 key heads, the shape has 6 and 2: use"):
        figure(plan, rs.Shape(heads=6, kv_heads=2, head_dim=8))
    figure(plan.for_heads(6, 2), rs.Shape(heads=6, kv_heads=2, head_dim=8))
