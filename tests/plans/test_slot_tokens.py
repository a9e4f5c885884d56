"""The tokens of slots, against layouts and mask: a task's bands, converted to tokens, are visible pairs of the mask."""

from __future__ import annotations

import numpy as np
import pytest

import ringspan as rs
from ringspan.masks import Mask
from ringspan.plans.data import PHASES, Phase
from ringspan.plans.slot_tokens import SlotTokens
from tests.dense_masks import bands as dense_bands
from tests.plans.examples import MASKS, STRATEGIES, all_plans, layouts_for

HEADS, KV_HEADS = 6, 3

CASES = [(mask, strategy, world) for mask in ("documents", "hole", "cross") for strategy in STRATEGIES for world in (1, 2, 4)]
CASES += [("causal", "hybrid(per_node=2, heads=6, kv_heads=3)", world) for world in (2, 4)]


@pytest.mark.parametrize(("name", "strategy", "world"), CASES)
def test_tasks_cover_the_mask_once_for_every_head_in_global_tokens(name: str, strategy: str, world: int) -> None:
    mask = MASKS[name]
    for layout in layouts_for(mask):
        plans = [p.for_heads(HEADS, KV_HEADS) for p in all_plans(mask, world, strategy, layout)]
        for phase in PHASES:
            times_HST = np.zeros((HEADS, *mask.lengths), dtype=np.int64)
            for plan in plans:
                _count(times_HST, plan, phase)
            assert (times_HST == mask.dense()).all(), (layout, phase)


def _count(times_HST: np.ndarray, plan: rs.Plan, phase: Phase) -> None:
    for task in (task for step in plan.program.steps(phase) for task in step.tasks):
        q, k = plan.task_tokens(task, "q"), plan.task_tokens(task, "kv")
        q_slot, k_slot = plan.program.q_slots[task.q_slot], plan.program.kv_slots[task.kv_slot]
        q_tokens, k_tokens = q.expand(q_slot.rows), k.expand(k_slot.rows)
        rows, cols = np.nonzero(dense_bands(task.bands, q_slot.rows, k_slot.rows))
        heads, kv_heads = q_slot.heads or HEADS, k_slot.heads or KV_HEADS
        assert q.first_head // (HEADS // KV_HEADS) == k.first_head
        assert heads // kv_heads == HEADS // KV_HEADS or kv_heads == 1
        for head in range(q.first_head, q.first_head + heads):
            np.add.at(times_HST, (head, q_tokens[rows], k_tokens[cols]), 1)


def test_rows_beyond_the_recorded_ones_have_a_token_that_exists() -> None:
    for plan in all_plans(rs.causal(23), 3, "exchange", "zigzag"):
        for task in (task for step in plan.program.forward for task in step.tasks):
            tokens = plan.task_tokens(task, "kv").expand(plan.program.kv_slots[task.kv_slot].rows)
            assert ((tokens >= 0) & (tokens < 23)).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_slots_of_other_ranks_tokens_are_recorded(strategy: str) -> None:
    for plan in all_plans(rs.causal(25), 3, strategy, "zigzag"):
        for task in (task for phase in PHASES for step in plan.program.steps(phase) for task in step.tasks):
            assert (task.q_tokens is None) == (task.q_slot == 0)
            assert (task.kv_tokens is None) == (task.kv_slot == 0)


def test_tokens_are_compared_by_value() -> None:
    one, other = (SlotTokens(np.array([[0, 4, 1], [8, 16, 2]]), first_head=3) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != one.for_heads(2)
    assert one != SlotTokens(np.array([[0, 4, 1], [8, 16, 1]]), first_head=3)
    assert one != SlotTokens(np.array([[0, 4, 1]]), first_head=3)
    with pytest.raises(ValueError, match="read-only"):
        one.spans[0, 0] = 1


@pytest.mark.parametrize("mask", [rs.full(0), rs.full(5, 0)], ids=str)
def test_plans_of_no_tokens_record_nothing(mask: Mask) -> None:
    for plan in all_plans(mask, 3, "ring", "contiguous"):
        assert not [task for step in plan.program.forward for task in step.tasks]
