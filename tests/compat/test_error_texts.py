"""Errors of ``ringspan.compat`` advise what its users call: torch's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ringspan as rs
from ringspan.compat import _context_parallel_shard, _ContextParallel, _HeadTailLoadBalancer, context_parallel
from tests.compat.jobs import mesh_of_all, qkv
from tests.conftest import Pools

N = 64
SDPA, FLEX = _ContextParallel.AttentionType.SDPA, _ContextParallel.AttentionType.FLEX


class Sdpa(nn.Module):
    def forward(self, *args: Any) -> Any:
        return F.scaled_dot_product_attention(*args, is_causal=True)


class Flex(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)


def of_another_length(rank: int) -> None:
    mesh, positions = mesh_of_all(), torch.arange(2 * N)
    torch._dynamo.reset()
    style, text = _ContextParallel(2, SDPA), r"_context_parallel_shard, or make it one of the buffers of context_parallel\("
    modules = [
        F.scaled_dot_product_attention,
        parallelize_module(Sdpa(), mesh, style),
        torch.compile(parallelize_module(Sdpa(), mesh, style), backend="aot_eager", fullgraph=True),
    ]
    with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
        for module in modules:
            with pytest.raises(rs.RingspanError, match=text) as raised:
                module(*qkv(16))
            assert "cp.shard" not in str(raised.value)


def a_part_of_a_sharded_mask(rank: int) -> None:
    mesh = mesh_of_all()
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, None, N, N, device="cpu", BLOCK_SIZE=16)
    *shards, mask_shard = _context_parallel_shard(mesh, [*qkv(N), mask], [2] * 4)
    module = parallelize_module(Flex(), mesh, _ContextParallel(2, FLEX))
    mask_mod = mask_shard.mask_mod
    made_of_it = create_block_mask(
        lambda b, h, q, k: mask_mod(b, h, q, k), None, None, N // mesh.size(), N, device="cpu", BLOCK_SIZE=16
    )
    for wrong in (mask_shard[:1], made_of_it):
        with pytest.raises(rs.InputError, match=r"has no known layout\. Index the whole mask, then shard it"):
            module(*(x[:1] for x in shards), block_mask=wrong)
    part = mask[:1]
    part.mask_mod = mask.mask_mod  # torch wants this after indexing
    (first,) = _context_parallel_shard(mesh, [part], [0])
    module(*(x[:1] for x in shards), block_mask=first)


def in_two_orders(rank: int) -> None:
    """The tensors were sharded with a balancer and the mask without, or the other way around."""
    mesh = mesh_of_all()
    balancer = _HeadTailLoadBalancer(N, mesh.size(), "cpu")
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu", BLOCK_SIZE=16)
    module = parallelize_module(Flex(), mesh, _ContextParallel(2, FLEX))
    shards = _context_parallel_shard(mesh, qkv(N), [2] * 3, balancer)
    (mask_shard,) = _context_parallel_shard(mesh, [mask], [0])
    with pytest.raises(rs.InputError, match=r"the BlockMask is in contiguous order.*\(head-tail\).*the same load_balancer"):
        module(*shards, block_mask=mask_shard)
    (mask_shard,) = _context_parallel_shard(mesh, [mask], [0], balancer)
    module(*shards, block_mask=mask_shard)
    _context_parallel_shard(mesh, [torch.arange(N)], [0])  # now there are tensors in both orders
    module(*shards, block_mask=mask_shard)


@pytest.mark.parametrize("job", [of_another_length, a_part_of_a_sharded_mask, in_two_orders])
def test_errors(pools: Pools, job: Any) -> None:
    pools(2).run(job)
