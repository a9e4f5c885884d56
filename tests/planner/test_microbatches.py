"""rs.pack: every document once, no rank over its limit, few microbatches of about equal time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringspan as rs
from ringspan.costs.hardware import hardware
from ringspan.costs.layer import layer_cost
from ringspan.testing.assertions import assert_close

SHAPE = rs.Shape(heads=8, kv_heads=2, head_dim=64)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=30),
    world=st.integers(1, 6),
    tokens_per_rank=st.integers(1, 40),
)
def test_every_document_is_in_one_microbatch_and_no_rank_has_too_many_tokens(
    lengths: list[int], world: int, tokens_per_rank: int
) -> None:
    if max(lengths, default=0) > world * tokens_per_rank:
        with pytest.raises(rs.InputError, match=f"document {int(np.argmax(lengths))} has {max(lengths)} tokens"):
            rs.pack(lengths, world, tokens_per_rank=tokens_per_rank)
        return
    made = rs.pack(lengths, world, tokens_per_rank=tokens_per_rank)
    packed = [i for part in made for i in part.documents]
    assert sorted(packed) == [i for i, n in enumerate(lengths) if n]
    for part in made:
        assert list(part.lengths) == [lengths[i] for i in part.documents]
        assert part.mask == rs.documents(part.lengths)
        assert part.layout.world == world
        assert max(part.layout.counts) <= tokens_per_rank
        assert sum(part.layout.counts) == part.tokens
    # Two microbatches never fit into one together: else the later one would not have been opened.
    assert len(made) <= max(1, 2 * -(-sum(lengths) // (world * tokens_per_rank)))


def test_microbatches_are_few_and_take_about_equally_long() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 400).astype(int).clip(8, 4000)
    capacity = 8 * 2048
    made = rs.pack(lengths, 8, tokens_per_rank=2048, hardware="h200x8", shape=SHAPE)
    assert len(made) == -(-int(lengths.sum()) // capacity)
    layer = layer_cost(hardware("h200x8"), SHAPE)
    times = [layer.seconds(part.tokens, sum(n * (n + 1) // 2 for n in part.lengths)) for part in made]
    assert max(times) <= 1.02 * min(times)


def test_over_nodes_microbatches_have_documents_of_similar_length() -> None:
    """Two nodes. Each document is in the first microbatch in which it fits: every one of a later microbatch is at most
    as long as all that were assigned when it did not fit."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 300).astype(int).clip(8, 2500).tolist()
    made = rs.pack(lengths, 4, tokens_per_rank=4096, hardware="h200x2", shape=SHAPE)
    assert sorted(i for part in made for i in part.documents) == list(range(300))
    assert len(made) == -(-sum(lengths) // (4 * 4096))
    assert [part.lengths[0] for part in made] == sorted((part.lengths[0] for part in made), reverse=True)
    for part in made:
        assert list(part.lengths) == sorted(part.lengths, reverse=True)
        assert max(part.layout.counts) <= 4096
        assert part.layout.name == "balanced(per_node=2)"
        part.plan.verify()
    tokens = [part.tokens for part in made]
    assert max(tokens) <= 1.01 * sum(tokens) / len(tokens)


def test_over_nodes_packing_fills_microbatches_if_equal_ones_do_not_suffice() -> None:
    """Three documents of 10 do not fit into 15 tokens twice, but into 20 and 10."""
    made = rs.pack([10, 10, 10], 4, tokens_per_rank=5, hardware="h200x2", shape=SHAPE)
    assert [part.lengths for part in made] == [(10, 10), (10,)]


def test_gradients_of_packed_keys_may_be_sent_in_bfloat16() -> None:
    for hardware_name in ("h200x2", "h200x8"):
        made = rs.pack([900, 300], 4, tokens_per_rank=512, hardware=hardware_name, shape=SHAPE, dkv_dtype="bfloat16")
        assert [part.plan.program.dkv_dtype for part in made] == ["bfloat16"]
    with pytest.raises(rs.PlanError, match="dkv_dtype must be one of"):
        rs.pack([900, 300], 4, tokens_per_rank=512, dkv_dtype="int8")  # type: ignore[arg-type]


def test_a_batch_packed_over_nodes_gives_the_results_of_its_documents() -> None:
    torch.manual_seed(0)
    lengths, world = [2100, 700, 300, 520, 40, 260], rs.LocalWorld(4)
    for part in rs.pack(lengths, 4, tokens_per_rank=640, hardware="h200x2", shape=SHAPE):
        q, k, v = (torch.randn(1, heads, part.tokens, 8, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
        out = world.attention(q, k, v, mask=part.mask, strategy=part.plan.strategy, layout=part.layout)
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), dout)
        dense = torch.from_numpy(part.mask.dense())
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
        assert_close(out, expected, rtol=1e-12, atol=1e-12)
        for gradient, wanted in zip(found, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
            assert_close(gradient, wanted, rtol=1e-11, atol=1e-11)


def test_matrix_products_count_as_much_as_they_are_said_to() -> None:
    """With free matrix products the long document is alone with the shortest ones; if they are all the work, tokens are
    shared evenly."""
    lengths = [64, *[8] * 16]
    by_pairs = rs.pack(lengths, 2, tokens_per_rank=64, shape=SHAPE, linear_flops=0)
    by_tokens = rs.pack(lengths, 2, tokens_per_rank=64, shape=SHAPE, linear_flops=1e15)
    assert [part.tokens for part in by_pairs] != [part.tokens for part in by_tokens]
    assert [part.tokens for part in by_tokens] == [96, 96]


def test_the_predicted_time_is_attention_and_matrix_products() -> None:
    (part,) = rs.pack([512, 256], 4, tokens_per_rank=192, hardware="h200x8", shape=SHAPE)
    attention = part.plan.cost("h200x8", SHAPE).seconds
    products = 3 * 192 * 1e9 / hardware("h200x8").forward.full
    assert part.seconds("h200x8", SHAPE, 1e9) == pytest.approx(attention + products, rel=1e-12)
    # A decoder layer of width 512: 12 · 512² parameters, two FLOPs for each.
    default = layer_cost(hardware("h200x8"), SHAPE)
    assert default.token_s == pytest.approx(3 * 2 * 12 * 512**2 / hardware("h200x8").forward.full, rel=1e-12)


def test_the_mask_of_a_microbatch_is_made_by_the_users_function() -> None:
    (part,) = rs.pack([30, 10], 2, tokens_per_rank=20, mask=lambda lengths: rs.documents(lengths) & rs.window(left=3))
    assert part.mask == rs.documents([30, 10]) & rs.window(left=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens_per_rank": 0}, "tokens_per_rank must be an integer of at least 1, not 0"),
        ({"tokens_per_rank": 1.5}, "tokens_per_rank must be an integer"),
        ({"linear_flops": float("nan")}, "linear_flops must be a number of at least 0"),
        ({"linear_flops": -1}, "linear_flops must be a number of at least 0"),
        ({"lengths": [3, -1]}, "lengths"),
        ({"mask": lambda lengths: rs.causal(100)}, r"mask\(\) gave .* for 7 tokens"),
        ({"world": 0}, "world"),
        ({"shape": 3}, "shape must be a ringspan.Shape"),
    ],
)
def test_invalid_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"lengths": [3, 4], "world": 2, "tokens_per_rank": 8, **given}
    with pytest.raises(rs.RingspanError, match=message):
        rs.pack(arguments.pop("lengths"), arguments.pop("world"), **arguments)


def test_an_empty_batch_has_no_microbatches() -> None:
    assert rs.pack([], 4, tokens_per_rank=8) == []
    assert rs.pack([0, 0], 4, tokens_per_rank=8) == []
