"""What is chosen for a machine, against everything that a hand could have picked."""

from __future__ import annotations

from itertools import product

import pytest

import ringspan as rs
from ringspan.layouts import LAYOUTS
from ringspan.plans import HARDWARE, Hardware, Link, Speed, best_on

# A laptop: computing is slow, and sending disturbs it.
LAPTOP = Hardware(
    name="laptop",
    per_node=4,
    within=Link(latency_s=2e-4, bytes_per_s=1.2e9),
    between=Link(latency_s=2e-4, bytes_per_s=1.2e9),
    forward=Speed(full=8e10, causal=8e10, window=3e10),
    backward=Speed(full=8e10, causal=8e10, window=4e10),
    launch_s=2e-4,
    tile=512,
    memory=8 * 2**30,
    overlap=0.2,
    source="a test",
)
STRATEGIES = ["ring", "gather", "gather(stages=3)", "exchange(stages=1)", "exchange(stages=2)", "exchange(stages=3)", "pass_q"]
DOCUMENTS = [36000, 1200, 8000, 16000, 2736, 1600]
MASKS = {
    "causal": rs.causal(65536),
    "full": rs.full(65536),
    "window": rs.causal(65536) & rs.window(left=4096),
    "documents": rs.documents(DOCUMENTS),
    "documents, both ways": rs.documents(DOCUMENTS, causal=False),
}
MACHINES = {"h200x8": HARDWARE["h200"], "h200x2": rs.plans.named_hardware("h200x2"), "laptop": LAPTOP}
SHAPES = [rs.Shape(heads=32, kv_heads=8, head_dim=128), rs.Shape(heads=4, kv_heads=4, head_dim=64, dtype="float32")]


@pytest.mark.parametrize("shape", SHAPES, ids=["32 heads", "4 heads"])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_no_hand_picked_plan_is_more_than_5_percent_faster(mask: rs.Mask, machine: Hardware, shape: rs.Shape) -> None:
    chosen = best_on(mask, world=4, hardware=machine, shape=shape).best
    assert chosen.cost is not None
    by_hand = [
        *STRATEGIES,
        "ulysses",
        f"hierarchical(per_node={machine.per_node})",
        f"hybrid(per_node={min(machine.per_node, 4)})",
    ]
    seconds = {
        f"{strategy} on {layout}": rs.plan(mask, world=4, strategy=strategy, layout=layout).cost(machine, shape).seconds
        for layout, strategy in product(LAYOUTS, by_hand)
    }
    fastest = min(seconds, key=lambda name: seconds[name])
    assert chosen.cost.seconds <= 1.05 * seconds[fastest], f"{fastest} is faster than {chosen}"
