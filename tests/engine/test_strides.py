"""Compare shards with any order of strides with PyTorch's own attention."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.engine import attend_ranks, config_for
from tests.engine.drivers import DeliverAtOnce

RANKS, SIZES = 2, (2, 4, 12, 8)  # batch, heads, tokens of a rank, dim


def random_shard(order: tuple[int, ...]) -> Tensor:
    """Return a random shard whose dims have this order in memory, the last one innermost."""
    return torch.randn([SIZES[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("strategy", ["ring", "exchange", "ulysses", "pass_q"])
def test_any_order_of_strides(strategy: str, backend: str) -> None:
    torch.manual_seed(0)
    first = rs.plan(rs.causal(RANKS * SIZES[2]), world=RANKS, strategy=strategy, layout="contiguous")
    plans = [first.at(rank).for_heads(SIZES[1], SIZES[1]) for rank in range(RANKS)]
    for order in permutations(range(4)):
        q, k, v, dout = ([random_shard(order).requires_grad_() for _ in range(RANKS)] for _ in range(4))
        config = config_for(plans[0], q[0], v[0], SIZES[3] ** -0.5, backend)
        parts = attend_ranks(plans, list(zip(q, k, v, strict=True)), config, DeliverAtOnce().run)
        out = torch.cat([part.out for part in parts], 2)
        want = F.scaled_dot_product_attention(*(torch.cat(x, 2).contiguous() for x in (q, k, v)), is_causal=True)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-6)
        grads, wanted = (torch.autograd.grad(x, [*q, *k, *v], torch.cat(dout, 2)) for x in (out, want))
        torch.testing.assert_close(grads, wanted, rtol=0, atol=1e-5)
