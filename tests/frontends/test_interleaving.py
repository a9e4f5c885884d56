"""``rs.interleave`` of two ContextParallels over 2 and 4 processes: bit for bit as one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from tests.conftest import Pools

LENGTHS = [30, 5, 12], [9, 44]


def layers(cp: rs.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two attention layers, forward and backward: the result and the gradients."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with cp:
        x = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
        x = F.scaled_dot_product_attention(x, leaves[1], leaves[2])
    return x.detach(), *torch.autograd.grad((x * x).sum(), leaves)


def interleaved(rank: int, strategy: str, compiled: bool) -> None:
    a, b = (rs.ContextParallel(None, rs.documents(lengths), strategy=strategy, layout="balanced") for lengths in LENGTHS)
    both = rs.interleave(a, b)
    torch.manual_seed(0)
    whole = [torch.randn(1, 4, 100, 8, dtype=torch.bfloat16) for _ in range(3)]
    shards = [both.shard(x, dim=2) for x in whole]
    rows = [a.plan.q_rows, b.plan.q_rows]
    for x, shard in zip(whole, shards, strict=True):
        assert torch.equal(torch.cat([a.shard(x[:, :, :47], dim=2), b.shard(x[:, :, 47:], dim=2)], dim=2), shard)
    run = torch.compile(layers, backend="aot_eager") if compiled else layers
    together = run(both, *shards)
    halves = [[x.split(rows, dim=2)[i] for x in shards] for i in (0, 1)]
    for x, of_a, of_b in zip(together, layers(a, *halves[0]), layers(b, *halves[1]), strict=True):
        assert torch.equal(x, torch.cat([of_a, of_b], dim=2))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", ["exchange(stages=2)", "ring", "hierarchical(per_node=2)"])
def test_two_batches_in_flight_equal_one_after_the_other(pools: Pools, world: int, strategy: str) -> None:
    pools(world).run(interleaved, strategy, False)


def test_heads_are_split_and_the_call_is_compiled(pools: Pools) -> None:
    pools(2).run(interleaved, "ulysses", False)
    pools(2).run(interleaved, "exchange(stages=2)", True)


def errors(rank: int) -> str:
    group = dist.new_group()  # it cannot be used after the error
    a, b = (rs.ContextParallel(group, rs.documents(lengths), strategy="ring", layout="zigzag") for lengths in LENGTHS)
    both = rs.interleave(a, b)
    others = rs.ContextParallel(dist.new_group([0, 1]), rs.documents(LENGTHS[1]))
    with pytest.raises(rs.InputError, match="part 1 has another process group"):
        rs.interleave(a, others)
    with pytest.raises(rs.InputError, match="part 1 has backend='reference', and part 0 'auto'"):
        rs.interleave(a, rs.ContextParallel(group, rs.documents(LENGTHS[1]), backend="reference"))
    q = torch.randn(1, 2, both.plan.q_rows, 8)
    both.attention(q, q, q)
    # Rank 1 has lost the rows of its second batch. All ranks raise, in the one call of both batches.
    try:
        mine = q if rank == 0 else q[:, :, : a.plan.q_rows]
        both.attention(mine, mine, mine)
    except rs.RingspanError as error:
        return type(error).__name__
    return "no error"


def test_an_error_in_one_batch_is_an_error_of_both(pools: Pools) -> None:
    assert pools(2).run(errors) == ["PeerFailed", "InputError"]
