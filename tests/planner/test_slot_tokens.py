"""What lies in the slots, against the layouts and the mask: a task's bands, said in tokens, are pairs that the mask shows."""

from __future__ import annotations

import numpy as np
import pytest

import ringspan as rs
from ringspan.masks import Mask
from ringspan.planner.slot_tokens import held
from ringspan.plans.data import PHASES
from tests.plans.examples import MASKS, STRATEGIES, all_plans, layouts_for
from tests.truth import bands as dense_bands

HEADS, KV_HEADS = 6, 3

CASES = [(mask, strategy, world) for mask in ("documents", "hole", "cross") for strategy in STRATEGIES for world in (1, 2, 4)]
CASES += [("causal", "hybrid(per_node=2, heads=6, kv_heads=3)", world) for world in (2, 4)]


@pytest.mark.parametrize(("name", "strategy", "world"), CASES)
def test_tasks_said_in_tokens_are_the_mask_once_for_every_head(name: str, strategy: str, world: int) -> None:
    mask = MASKS[name]
    for layout in layouts_for(mask):
        plans = [p.for_heads(HEADS, KV_HEADS) for p in all_plans(mask, world, strategy, layout)]
        for phase in PHASES:
            times_HST = np.zeros((HEADS, *mask.lengths), dtype=np.int64)
            for plan in plans:
                _count(times_HST, plan, phase)
            assert (times_HST == mask.dense()).all(), (layout, phase)


def _count(times_HST: np.ndarray, plan: rs.Plan, phase: str) -> None:
    for step, contents in zip(plan.program.steps(phase), held(plan, phase), strict=True):  # type: ignore[arg-type]
        for task in step.tasks:
            q, k = contents["q", task.q_slot], contents["kv", task.kv_slot]
            rows, cols = np.nonzero(dense_bands(task.bands, len(q.tokens), len(k.tokens)))
            heads = plan.program.q_slots[task.q_slot].heads or HEADS
            kv_heads = plan.program.kv_slots[task.kv_slot].heads or KV_HEADS
            assert q.first_head // (HEADS // KV_HEADS) == k.first_head
            assert heads // kv_heads == HEADS // KV_HEADS or kv_heads == 1
            for head in range(q.first_head, q.first_head + heads):
                np.add.at(times_HST, (head, q.tokens[rows], k.tokens[cols]), 1)


def test_rows_that_hold_nothing_yet_have_a_token_that_exists() -> None:
    for plan in all_plans(rs.causal(23), 3, "exchange", "zigzag"):
        for contents in (c for step in held(plan, "forward") for c in step.values()):
            assert ((contents.tokens >= 0) & (contents.tokens < 23)).all()


@pytest.mark.parametrize("mask", [rs.full(0), rs.full(5, 0)], ids=str)
def test_nothing_lies_nowhere(mask: Mask) -> None:
    for plan in all_plans(mask, 3, "ring", "contiguous"):
        assert len(held(plan, "forward")) == len(plan.program.forward)
