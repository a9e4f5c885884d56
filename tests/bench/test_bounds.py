"""The lower bound of a batch's time is below every candidate, and near the best one where messages decide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringspan as rs
from ringspan.bench.bounds import crossing_bytes, least_seconds
from ringspan.bench.layouts import fewest_rows
from ringspan.costs.hardware import Hardware, Link, hardware
from ringspan.costs.layer import layer_cost

SHAPE = rs.Shape(heads=4, kv_heads=2, head_dim=64)
STRATEGIES = (
    "exchange(stages=1)",
    "exchange(stages=3)",
    "hierarchical(per_node=2)",
    "hierarchical(per_node=2, pieces=3)",
    "hybrid(per_node=2)",
    "pass_q",
    "ring",
    "ulysses",
)


def slow_link(bytes_per_s: float, per_node: int = 2, copy_bytes_per_s: float = 1e12) -> Hardware:
    """A machine on which messages between nodes decide."""
    between = Link(latency_s=0.0, bytes_per_s=bytes_per_s)
    return replace(hardware("h200"), per_node=per_node, between=between, launch_s=0.0, copy_bytes_per_s=copy_bytes_per_s)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=6),
    world=st.sampled_from([2, 4, 6]),
    layout=st.sampled_from(["balanced", "zigzag", "contiguous"]),
    bytes_per_s=st.sampled_from([1e8, 1e9, 1e10, 1e11]),
    copy_bytes_per_s=st.sampled_from([1e8, 1e10, 1e12]),
)
def test_no_plan_is_faster(lengths: list[int], world: int, layout: str, bytes_per_s: float, copy_bytes_per_s: float) -> None:
    machine = slow_link(bytes_per_s, copy_bytes_per_s=copy_bytes_per_s)
    mask = rs.documents(lengths)
    for strategy in STRATEGIES:
        plan = rs.plan(mask, world=world, layout=layout, strategy=strategy, hardware=machine)
        bound = least_seconds(lengths, world, max(plan.q_layout.counts), machine, SHAPE)
        assert bound <= plan.cost(machine, SHAPE).seconds


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=12), bytes_per_s=st.sampled_from([1e8, 1e9, 1e10]))
def test_no_batch_is_packed_to_be_faster(lengths: list[int], bytes_per_s: float) -> None:
    machine, tokens_per_rank = slow_link(bytes_per_s), 1024
    layer = layer_cost(machine, SHAPE)
    parts = rs.pack(lengths, 4, tokens_per_rank=tokens_per_rank, hardware=machine, shape=SHAPE)
    bound = least_seconds(lengths, 4, tokens_per_rank, machine, SHAPE, token_s=layer.token_s)
    assert bound <= sum(part.seconds(machine, SHAPE) for part in parts)


def test_without_a_second_node_the_bound_is_the_work() -> None:
    machine = slow_link(1.0, per_node=4, copy_bytes_per_s=1e18)
    alone = least_seconds([4000], 1, 4000, machine, SHAPE, token_s=1e-6)
    assert least_seconds([4000], 4, 1000, machine, SHAPE, token_s=1e-6) == pytest.approx(alone / 4, rel=1e-6)
    assert least_seconds([], 4, 1000, machine, SHAPE) == 0.0


def test_messages_count_where_a_document_exceeds_a_node() -> None:
    """As many rows as in ``fewest_rows`` cross. Over a slow link they take longer than attention. With few query heads
    an exchange of heads would take fewer bytes."""
    shape = rs.Shape(heads=4, kv_heads=1, head_dim=64)
    row = 2 * 64 * (2 + 4)  # keys and values in bfloat16 once, and their gradients in float32
    assert crossing_bytes([4096], 2048, 4096 * 4097 // 4, shape) == row * fewest_rows([4096], 2, 1.0)
    fast, slow = (least_seconds([4096], 4, 1024, slow_link(rate), SHAPE) for rate in (1e15, 1e6))
    assert slow > 100 * fast


def test_merging_counts_where_a_document_exceeds_a_rank() -> None:
    """Rank 0 has the first 1024 rows alone. Of the others at least a result of 64 features with lse (padded to 144
    bytes) and a gradient are copied, in bfloat16."""
    free, merged = (least_seconds([2048], 2, 1024, slow_link(1e9, copy_bytes_per_s=rate), SHAPE) for rate in (1e18, 1e9))
    assert merged - free == pytest.approx(1024 * 4 * (144 + 64 * 2) / 2 / 1e9, rel=1e-3)


def test_gradients_in_bfloat16_need_fewer_bytes() -> None:
    assert crossing_bytes([64], 32, 1e9, SHAPE, "bfloat16") * 3 == crossing_bytes([64], 32, 1e9, SHAPE) * 2
