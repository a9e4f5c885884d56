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


def reorder(x: Tensor) -> Tensor:
    """Return the tensor with its first dim innermost in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["ring", "exchange", "ulysses", "ulysses(keep=False)", "pass_q", "hybrid(per_node=2)"])
def test_hooks_of_saved_tensors_may_change_strides(strategy: str, dtype: torch.dtype, backend: str) -> None:
    """Also of the tensors that kernels and messages need in one order."""
    plan = rs.plan(rs.causal(4 * SIZES[2]), world=4, strategy=strategy, layout="zigzag").for_heads(4, 2)
    plans, found = [plan.at(rank) for rank in range(4)], []
    torch.manual_seed(0)
    q, k, v, dout = (
        [torch.randn(2, heads, 12, 8, dtype=dtype, requires_grad=True) for _ in range(4)] for heads in (4, 2, 2, 4)
    )
    config = config_for(plans[0], q[0], v[0], 8**-0.5, backend)
    for unpack in (reorder, torch.clone):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
            parts = attend_ranks(plans, list(zip(q, k, v, strict=True)), config, DeliverAtOnce().run)
            found.append(torch.autograd.grad([part.out for part in parts], [*q, *k, *v], dout))
    for changed, unchanged in zip(*found, strict=True):
        torch.testing.assert_close(changed, unchanged, rtol=0, atol=0.02 if dtype == torch.bfloat16 else 1e-13)
