"""``rs.interleave`` of plans: correct programs, the same results bit for bit, named errors."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import ringspan as rs
from ringspan.costs.timeline import NO_PEERS, Loads, simulate
from ringspan.plans import Step, verify
from ringspan.strategies import parse_strategy, spec
from ringspan.testing.assertions import assert_close
from tests.plans.dense_simulation import assert_exactly_once

WORLD = 4
A, B = rs.documents([13, 9, 30]), rs.documents([20, 41]) & rs.window(left=25)
HYBRID = "hybrid(per_node=2, heads=4, kv_heads=2)"
PAIRS = [
    ("exchange(stages=2)", "ring"),
    ("hierarchical(per_node=2)", "hierarchical(per_node=2)"),
    (HYBRID, HYBRID),
    ("pass_q", "ulysses(heads=4, kv_heads=2)"),
    ("gather", "exchange(stages=1)"),
]


def plans(mask: rs.Mask, strategy: str, layout: str) -> list[rs.Plan]:
    first = rs.plan(mask, world=WORLD, rank=0, strategy=strategy, layout=layout)
    return [first.at(rank) for rank in range(WORLD)]


@pytest.mark.parametrize("strategies", PAIRS, ids=lambda pair: " + ".join(pair))
def test_interleaved_plans_are_correct_and_equal_the_parts_bit_for_bit(strategies: tuple[str, str]) -> None:
    a, b = plans(A, strategies[0], "balanced"), plans(B, strategies[1], "zigzag")
    both = [rs.interleave(x, y) for x, y in zip(a, b, strict=True)]
    both[0].verify()
    assert_exactly_once(both)
    assert both[0].at(2) == both[2]
    assert rs.Plan.from_json(both[1].to_json()).program == both[1].program
    torch.manual_seed(0)
    world, cut = rs.LocalWorld(WORLD), A.lengths[0]
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = (torch.randn(2, heads, 113, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
        out = world.run(both, q, k, v).out
        one_after_the_other = torch.cat(
            [
                world.run(a, q[:, :, :cut], k[:, :, :cut], v[:, :, :cut]).out,
                world.run(b, q[:, :, cut:], k[:, :, cut:], v[:, :, cut:]).out,
            ],
            dim=2,
        )
        assert torch.equal(out, one_after_the_other)
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        for x, y in zip(gradients, torch.autograd.grad(one_after_the_other, (q, k, v), dout), strict=True):
            assert torch.equal(x, y)
        if dtype == torch.float64:
            dense = torch.from_numpy(both[0].mask.dense())
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
            assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_three_parts_and_parts_without_rows() -> None:
    masks = [rs.causal(17), rs.documents([0]), rs.full(5)]
    three = [rs.interleave(*(plans(mask, "ring", "contiguous")[rank] for mask in masks)) for rank in range(WORLD)]
    assert three[0].program.in_flight == 3
    three[0].verify()
    assert_exactly_once(three)


def test_a_plan_that_splits_heads_is_fitted_to_the_tensors() -> None:
    (both,) = {rs.interleave(plans(A, HYBRID, "balanced")[0], plans(B, "ring", "zigzag")[0])}
    assert both.for_heads(8, 8).program.heads == (8, 8)
    assert "heads=8, kv_heads=8" in both.for_heads(8, 8).strategy


def test_messages_hide_behind_the_compute_of_the_other_part() -> None:
    # Two ranks, steps a0 b0 a1 b1. Each exchange takes 3 and each step computes for 2.
    peers = np.array([0, 1]), np.array([1, 0])
    two, three = np.full((2, 4), 2.0), np.array([[3.0, 3.0, 0.0, 0.0]] * 2)
    loads = Loads(two, three, np.zeros((2, 4)), [peers, peers, NO_PEERS, NO_PEERS])
    # Waiting at once: 3 + 3 + 2 + 2. With two in flight the link is busy until 6, a0 has arrived at 3, while b0 is
    # computed: b0 ends at 4, a1 at max(6, 6), b1 at 8. No rank ever waits.
    assert simulate(loads, 1.0).seconds == 10.0
    assert simulate(loads._replace(in_flight=2), 1.0).seconds == 8.0
    slow = loads._replace(in_flight=2, communication=2 * three)
    # The link is busy until 12: a0 has arrived at 6, b0 at 12.
    assert simulate(slow, 1.0).end[0].tolist() == [2.0, 6.0, 12.0, 14.0]
    # What is hidden of an exchange slows the computing down: 3 of 3, and 3 of 3.
    assert simulate(loads._replace(in_flight=2), 0.9).seconds == pytest.approx(8.6)


def test_with_three_exchanges_in_flight_the_third_step_waits_for_the_first() -> None:
    peers = np.array([0, 1]), np.array([1, 0])
    exchange = np.array([[10.0, 0.0, 0.0, 0.0]] * 2)
    loads = Loads(np.ones((2, 4)), exchange, np.zeros((2, 4)), [peers, NO_PEERS, NO_PEERS, NO_PEERS], in_flight=3)
    assert simulate(loads, 1.0).end[0].tolist() == [1.0, 2.0, 10.0, 11.0]


def test_the_messages_of_the_last_steps_arrive_before_the_end() -> None:
    peers = np.array([0, 1]), np.array([1, 0])
    loads = Loads(np.ones((2, 1)), np.full((2, 1), 5.0), np.zeros((2, 1)), [peers], in_flight=3)
    assert simulate(loads, 1.0).seconds == 5.0


def test_verify_finds_rows_that_are_overwritten_while_messages_are_in_flight() -> None:
    """Each of these is correct if a step waits for its own messages, and a race if it waits for those of an earlier
    one."""
    ring = plans(rs.causal(32), "ring", "zigzag")
    verify(ring)
    for in_flight, message in ((2, "in use in the same step|hold nothing yet"), (0, "same number of exchanges in flight")):
        wrong = [replace(plan, program=replace(plan.program, in_flight=in_flight)) for plan in ring]
        with pytest.raises(rs.PlanError, match=message):
            verify(wrong)
    # Empty steps in between make it correct again.
    spread = []
    for plan in ring:
        steps = {
            phase: tuple(step for each in plan.program.steps(phase) for step in (each, Step()))
            for phase in ("forward", "backward")
        }
        spread.append(replace(plan, program=replace(plan.program, in_flight=2, **steps)))
    verify(spread)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interleave(parts=())", "parts must be a tuple with the strategy of each part"),
        ("interleave(parts=('ring', 'ring'))", "starts must have the first query and the first key of each part but the first"),
        ("interleave(parts=('ring', 'rung'), starts=((4, 4),))", "no strategy is called 'rung'"),
        ("interleave(parts=('ring', 'ring'), starts=((4, 4),))", "does not split into independent parts at ((4, 4),)"),
        ("interleave(parts=('ring', 'ring'), starts=((4, 40),))", "must follow each other within 8 queries and 8 keys"),
    ],
)
def test_wrong_options_are_named(text: str, message: str) -> None:
    with pytest.raises(rs.PlanError, match=re.escape(message)):
        rs.plan(rs.causal(8), world=2, rank=0, strategy=text)


def test_the_old_name_of_starts_is_read() -> None:
    """Plan files may have it in the text of their strategy."""
    with pytest.warns(DeprecationWarning, match=r"interleave\(starts="):
        old = parse_strategy("interleave(parts=('ring', 'exchange(stages=1)'), at=((4, 4),))")
    assert old == rs.Interleave(parts=("ring", "exchange(stages=1)"), starts=((4, 4),))
    assert spec(old) == "interleave(parts=('ring', 'exchange(stages=1)'), starts=((4, 4),))"


def test_parts_that_do_not_follow_each_other_on_a_rank_are_refused() -> None:
    layout = rs.Layout([[(4, 6), (0, 2)], [(2, 4), (6, 8)]])
    strategy = parse_strategy("interleave(parts=('ring', 'ring'), starts=((4, 4),))")
    with pytest.raises(rs.PlanError, match=r"on rank 0 .* the tokens of the parts at \[4\] do not follow each other"):
        rs.plan(rs.documents([4, 4]), world=2, rank=0, strategy=strategy, layout=layout)


def test_plans_that_cannot_be_joined_are_refused() -> None:
    a = plans(A, "ring", "zigzag")
    rows = rs.plan(rs.documents([[3, 5], [8]]), world=WORLD, rank=0)
    function = rs.plan(rs.mask_mod(lambda b, h, q, k: (q * k) % 3 == 0, 16), world=WORLD, rank=0)
    ulysses = [rs.plan(A, world=WORLD, rank=0, strategy=f"ulysses(heads={n}, kv_heads=4)") for n in (4, 8)]
    for parts, kind, message in [
        ((a[0],), rs.InputError, "at least two plans"),
        ((a[0], 5), rs.InputError, "interleave takes plans, or ContextParallels, and not both; got Plan, int"),
        ((a[0], a[1]), rs.PlanError, "plan 1 is that of rank 1 of 4, plan 0 that of rank 0 of 4"),
        ((a[0], rows), rs.PlanError, "differs between the rows of a batch"),
        ((a[0], function), rs.PlanError, "is defined by a function"),
        ((a[0], rs.plan(A, world=WORLD, rank=0, dkv_dtype="bfloat16")), rs.PlanError, "dkv_dtype is bfloat16 in plan 1"),
        (ulysses, rs.PlanError, "different numbers of heads: (4, 4), (8, 4)"),
    ]:
        with pytest.raises(kind, match=re.escape(message)):
            rs.interleave(*parts)
