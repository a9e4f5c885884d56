"""Planning the next sequence while this one is computed: the same plans as without, on all ranks, and errors at their use."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import ringspan as rs
from ringspan.frontends import context_parallel
from ringspan.kernels.reference import dense_attention
from tests.conftest import Pools

# A new mask every step, and not even the same number of tokens.
SEQUENCES = [[5, 9, 1, 16], [31], [2, 2, 2, 25], [40, 3]]


def steps_with_prefetch(rank: int, strategy: str, layout: str) -> list[tuple[str, str, float]]:
    """Of each step the digest of the plan, that of a plan made without a thread, and how wrong attention is."""
    masks = [rs.documents(lengths) for lengths in SEQUENCES]
    cp, seen = rs.ContextParallel(None, masks[0], strategy=strategy, layout=layout), []
    for mask, following in zip(masks, [*masks[1:], None], strict=True):
        time.sleep(0.01 * rank)  # so that the ranks' threads do not run at the same time
        upcoming = None if following is None else cp.prefetch(following)
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 1, 4, mask.lengths[0], 8, dtype=torch.float64)
        with cp:
            out = F.scaled_dot_product_attention(*cp.shard(q, k, v, dim=2))
        want = dense_attention(q, k, v, torch.from_numpy(mask.dense())).out
        planned = rs.plan(mask, world=cp.world, rank=rank, strategy=strategy, layout=layout)
        seen.append((cp.plan.digest, planned.digest, (cp.unshard(out, dim=2) - want).abs().max().item()))
        cp = upcoming.result() if upcoming else cp
    return seen


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("strategy", "layout"), [("auto", "auto"), ("ring", "zigzag"), ("ulysses", "balanced")])
def test_prefetched_plans_equal_plans_made_in_place(pools: Pools, strategy: str, layout: str, world: int) -> None:
    ranks = pools(world).run(steps_with_prefetch, strategy, layout)
    assert all(digest == planned and error < 1e-13 for rank in ranks for digest, planned, error in rank)
    assert len({tuple(digest for digest, *_ in rank) for rank in ranks}) == 1
    assert len({digest for digest, *_ in ranks[0]}) == len(SEQUENCES)


@pytest.mark.usefixtures("world_of_one")
def test_prefetch_returns_before_the_plan_is_made() -> None:
    """Planning waits for the step: it runs in another thread."""
    cp, step_is_done, planning_in = rs.ContextParallel(None, rs.causal(8)), threading.Event(), []

    def plan_later(*args: Any, **kwargs: Any) -> rs.Plan:
        planning_in.append(threading.current_thread())
        assert step_is_done.wait(30)
        return rs.plan(*args, **kwargs)

    with patch.object(context_parallel, "plan", plan_later):
        upcoming = cp.prefetch(rs.documents([3, 5]))
        with cp:
            F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 8, 4))
        assert not upcoming.done()
        step_is_done.set()
        assert upcoming.result(30).plan == rs.plan(rs.documents([3, 5]), world=1)
    assert planning_in != [threading.current_thread()]


def planned_for_a_machine(rank: int) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The notes of plans that follow from the first, and of those made for that machine and those tensors directly."""
    machine, shape = "h200x1", rs.Shape(heads=4, kv_heads=2, head_dim=8)
    cp = rs.ContextParallel(None, rs.causal(64), hardware=machine, shape=shape)
    following, other = rs.documents([40, 3]), rs.full(64)
    layouts = {"layout": cp.plan.q_layout, "kv_layout": cp.plan.kv_layout}
    return [
        (
            cp.prefetch(following).result().plan.notes,
            rs.plan(following, world=cp.world, rank=rank, hardware=machine, shape=shape).notes,
        ),
        (
            cp.with_mask(other).plan.notes,
            rs.plan(other, world=cp.world, rank=rank, hardware=machine, shape=shape, **layouts).notes,  # type: ignore[arg-type]
        ),
    ]


def test_prefetch_keeps_hardware_and_shape(pools: Pools) -> None:
    for rank in pools(3).run(planned_for_a_machine):
        assert all(notes == directly and "on h200, nodes of 1" in " ".join(notes) for notes, directly in rank)


def a_mask_without_length(rank: int) -> str:
    upcoming = rs.ContextParallel(None, rs.causal(8)).prefetch(rs.window(left=2))
    try:
        upcoming.result()
    except rs.MaskError as error:
        return str(error)
    return "nothing was raised"


def test_errors_of_planning_are_raised_by_result(pools: Pools) -> None:
    assert all(said.startswith("window(left=2) holds at any length") for said in pools(2).run(a_mask_without_length))
