"""The cost of plans: small examples computed by hand, and properties that hold on any machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ringspan as rs
from ringspan.costs import HARDWARE, Link, Speed
from ringspan.planner import cost
from ringspan.plans.shape import bytes_moved
from tests.plans.machines import SLOW

TINY = rs.Shape(heads=1, kv_heads=1, head_dim=1, dtype="float32")


def plans(mask: rs.Mask, world: int, strategy: str, layout: str = "contiguous") -> list[rs.Plan]:
    return rs.LocalWorld(world).plans(mask, strategy=strategy, layout=layout)


def test_one_rank_only_computes() -> None:
    found = cost(plans(rs.full(8), 1, "gather"), SLOW, TINY)
    assert found.forward.seconds == pytest.approx(0.25 + 64)
    assert found.backward.seconds == pytest.approx(0.25 + 64)
    assert found.exposed_s == 0


def test_a_diagonal_has_a_speed_of_its_own_and_costs_half_a_tile_a_row() -> None:
    area = 8 * 9 / 2
    found = cost(plans(rs.causal(8), 1, "gather"), SLOW, TINY)
    assert found.forward.seconds == pytest.approx(0.25 + area * 4 / 2)
    found = cost(plans(rs.causal(8), 1, "gather"), replace(SLOW, tile=4), TINY)
    assert found.forward.seconds == pytest.approx(0.25 + (area + 2 * 8) * 4 / 2)


def test_two_ranks_of_a_node_by_hand() -> None:
    """4 keys of 8 bytes each are sent while 4 × 4 pairs are computed, which hides them; then the other 4 × 4 are
    computed."""
    found = cost(plans(rs.full(8), 2, "gather"), SLOW, TINY).forward
    assert found.computed.tolist() == [[pytest.approx(16.25), pytest.approx(32.5)]] * 2
    assert found.exposed.tolist() == [0, 0]


def test_rows_that_go_to_several_peers_are_packed_once() -> None:
    """Rank 0 sends its 4 keys of 8 bytes in three ranges to each of two peers, which unpack them."""
    layout = rs.Layout([[(0, 1), (4, 5), (8, 10)], [(1, 4)], [(5, 8)]], length=10)
    made = [rs.plan(rs.full(10), world=3, rank=rank, layout=layout, strategy="exchange(stages=1)") for rank in range(3)]
    loads = {}
    for rate in (16.0, float("inf")):
        found = cost(made, replace(SLOW, copy_bytes_per_s=rate), TINY).forward
        loads[rate] = found.end[:, 0] - np.maximum(found.computed[:, 0], 0)
    assert (loads[16.0] - loads[float("inf")]).tolist() == pytest.approx([4 * 8 / 16] * 3)


def test_each_copy_is_a_launch_and_an_output_is_two_tensors() -> None:
    """The results of the other rank are packed and unpacked, out and lse alike, and merged; in the backward pass dq is
    added, and dkv nothing, since keys stay."""
    plan = plans(rs.full(4), 2, "pass_q(stages=1)")
    machines = [replace(SLOW, copy_launch_s=launch_s) for launch_s in (0.0, 0.125)]
    free, found = (cost(plan, machine, TINY) for machine in machines)
    assert found.forward.seconds - free.forward.seconds == pytest.approx(0.125 * (2 + 2))
    assert found.backward.seconds - free.backward.seconds == pytest.approx(0.125 * 1)


def test_results_are_merged_where_bands_share_queries() -> None:
    """Both bands of the second task have queries of the first: 2 + 3 rows of out and lse (8 bytes), and of dq (4)."""
    mask = rs.Mask.from_bands([(0, 4, 0, 4, -9, 9), (0, 2, 4, 6, -9, 9), (1, 4, 6, 8, -9, 9)], 4, 8)
    layouts = {"layout": [[(0, 4)], []], "kv_layout": [[(0, 4)], [(4, 8)]]}
    both = [rs.plan(mask, world=2, rank=rank, strategy="exchange(stages=1)", **layouts) for rank in range(2)]  # type: ignore[arg-type]
    free, found = (cost(both, replace(SLOW, copy_bytes_per_s=rate), TINY) for rate in (float("inf"), 16.0))
    assert found.forward.end[0, 1] - free.forward.end[0, 1] == pytest.approx(5 * 8 / 16)
    assert found.backward.end[0, 1] - free.backward.end[0, 1] == pytest.approx(5 * 4 / 16)


@pytest.mark.parametrize(("kv_heads", "key_bytes"), [(2, 2 * 2 * 4), (4, 0)])
def test_the_backward_pass_makes_passes_over_the_rows_of_each_band(kv_heads: int, key_bytes: int) -> None:
    """Over keys only where query heads share them: then their gradients are summed in float32."""
    shape = rs.Shape(heads=4, kv_heads=kv_heads, head_dim=1, dtype="float32")
    made = plans(rs.Mask.from_bands([(0, 6, 0, 3, -9, 9), (2, 6, 3, 8, -9, 9)], 6, 8), 1, "gather")
    machine = replace(SLOW, copy_bytes_per_s=32.0)
    free, found = cost(made, machine, shape), cost(made, replace(machine, query_passes=3.0, key_passes=2.0), shape)
    assert found.forward.seconds == free.forward.seconds
    rows = 3 * (6 + 4) * 4 * 4 + 2 * (3 + 5) * key_bytes
    assert found.backward.seconds - free.backward.seconds == pytest.approx(rows / 32)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 1.0])
def test_computing_and_sending_may_slow_each_other_down(overlap: float) -> None:
    """The same, where a share of the 0.82 s of communication is not hidden behind the 16.25 s of computing."""
    found = cost(plans(rs.full(8), 2, "gather"), replace(SLOW, overlap=overlap), TINY).forward
    assert found.exposed.tolist() == [pytest.approx((1 - overlap) * 0.82)] * 2
    assert found.seconds == pytest.approx(32.5 + (1 - overlap) * 0.82)


def test_messages_that_are_not_contiguous_are_copied() -> None:
    """Results are sent back as 2 rows of out and lse, 8 bytes each, packed and unpacked; queries and keys are sent in
    place."""
    plan = plans(rs.full(4), 2, "pass_q(stages=1)")
    found, free = (cost(plan, replace(SLOW, copy_bytes_per_s=rate), TINY).forward.seconds for rate in (16.0, float("inf")))
    assert found - free == pytest.approx(2 * 2 * 8 / 16)


def test_tiles_are_no_wider_than_the_band() -> None:
    """Of 3 diagonals of 8 × 8, two of which are cut off at the corner; 3 is less than the tile of 4."""
    mask = rs.causal(8) & rs.window(left=2)
    found = cost(plans(mask, 1, "gather"), replace(SLOW, tile=4), TINY)
    assert found.forward.seconds == pytest.approx(0.25 + (8 + 7 + 6 + 2 * 3 / 2 * 8) * 4 / 1)


@pytest.mark.parametrize(("per_node", "communication"), [(2, 0.5 + 32 / 100), (1, 2.0 + 32 / 10)])
def test_communication_that_is_not_hidden_is_exposed(per_node: int, communication: float) -> None:
    """Two documents, each on the rank that does not own its keys: nothing can be computed until they arrive."""
    mask = rs.documents([4, 4], causal=False)
    layouts = {"layout": [[(0, 4)], [(4, 8)]], "kv_layout": [[(4, 8)], [(0, 4)]]}
    both = [rs.plan(mask, world=2, rank=rank, strategy="exchange(stages=1)", **layouts) for rank in range(2)]  # type: ignore[arg-type]
    found = cost(both, replace(SLOW, per_node=per_node), TINY).forward
    assert found.exposed.tolist() == [pytest.approx(communication)] * 2
    assert found.seconds == pytest.approx(communication + 16.25)
    assert bytes_moved(both[0], TINY, "forward") == (32, 32)


def test_a_message_waits_for_the_slower_side() -> None:
    """Rank 1 has four times the work of step 0 and posts step 1 late; rank 0 waits for it."""
    mask = rs.Mask.from_bands([(0, 2, 0, 2, -9, 9), (2, 8, 2, 8, -9, 9), (0, 2, 6, 8, -9, 9)], 8)
    both = rs.LocalWorld(2).plans(mask, strategy="ring", layout=[[(0, 2)], [(2, 8)]])
    found = cost(both, SLOW, TINY).backward
    assert np.array_equal(found.begin[:, 1:], found.end[:, :-1])
    on_the_wire = [n for n, step in enumerate(both[0].program.backward) if step.sends and n]
    assert on_the_wire
    assert all(found.begin[0, n] < found.begin[1, n] < found.end[0, n] for n in on_the_wire[:1])
    assert found.exposed[0] > found.exposed[1]


@pytest.mark.parametrize(
    "strategy", ["ring", "gather", "exchange", "pass_q", "ulysses", "hierarchical(per_node=4)", "hybrid(per_node=4)"]
)
def test_computing_does_not_depend_on_what_is_sent(strategy: str) -> None:
    """Without launches, tiles and communication all pairs of all heads are computed once, and no rank ends before an
    even share."""
    free = replace(
        SLOW,
        launch_s=0.0,
        within=Link(latency_s=0.0, bytes_per_s=1e30),
        between=Link(latency_s=0.0, bytes_per_s=1e30),
        forward=Speed(full=1.0, causal=1.0, window=1.0),
    )
    shape = rs.Shape(heads=8, kv_heads=2, head_dim=4)
    mask = rs.causal(64)
    found = cost(plans(mask, 8, strategy, "zigzag"), free, shape).forward
    whole = mask.area * 8 * 2 * 8
    computed = (found.computed - found.begin).sum()
    assert computed == pytest.approx(whole)
    assert found.seconds >= whole / 8 - 1e-6


def test_plan_cost_method() -> None:
    plan = rs.plan(rs.causal(64), world=4, rank=3, strategy="ring", layout="zigzag")
    assert plan.cost(SLOW, TINY).seconds == cost(plans(rs.causal(64), 4, "ring", "zigzag"), SLOW, TINY).seconds
    assert plan.cost("h200x8").peak_bytes > 0


def test_the_cost_of_a_sample_is_marked_as_one() -> None:
    """Ranks of a zigzag causal mask do alike, so that half of them cost what all of them cost."""
    all_ranks = plans(rs.causal(64), 8, "gather", "zigzag")
    whole, some = cost(all_ranks, SLOW, TINY), cost(all_ranks[::3], SLOW, TINY)
    assert (whole.is_exact, whole.ranks) == (True, tuple(range(8)))
    assert (some.is_exact, some.ranks, some.world) == (False, (0, 3, 6), 8)
    assert some.forward.end.shape[0] == 3
    np.testing.assert_allclose(some.forward.end, whole.forward.end[::3])
    np.testing.assert_allclose(some.backward.end, whole.backward.end[::3])


def test_partial_results_are_merged() -> None:
    """Around a ring all parts but the first, each of all rows: out with lse forward, dq backward."""
    plan, shape = rs.plan(rs.full(64), world=4, strategy="ring", layout="contiguous"), rs.Shape(heads=2, kv_heads=2, head_dim=8)
    slow, fast = (replace(HARDWARE["h200"], copy_bytes_per_s=rate) for rate in (1e3, 1e15))
    longer = plan.cost(slow, shape).forward.seconds - plan.cost(fast, shape).forward.seconds
    assert longer == pytest.approx(3 * 16 * 2 * (8 + 1) * 4 / 1e3)
