"""FlexAttention in blocks and parallelized modules: every balancer, out, lse and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ringspan.compat import (
    _context_parallel_shard,
    _ContextParallel,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    context_parallel,
    context_parallel_unshard,
)
from ringspan.frontends import context_parallel as context_parallel_module
from ringspan.testing.assertions import assert_close
from tests.compat.jobs import assert_near, mesh_of_all, qkv
from tests.compat.test_balancers import documents_mask
from tests.conftest import Pools

N, BLOCK = 160, 16


def lengths_of_documents(count: int, seed: int) -> list[int]:
    cuts = sorted(random.Random(seed).sample(range(1, N), count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, N], strict=True)]


DOCUMENTS = [lengths_of_documents(28, seed) for seed in (1, 2)]

MASKS: dict[str, Callable[[], BlockMask]] = {
    "causal": lambda: create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu", BLOCK_SIZE=BLOCK),
    "28 documents a row": lambda: documents_mask(DOCUMENTS, block=BLOCK),
}

BALANCERS: dict[str, Callable[[BlockMask, int], _LoadBalancer | None]] = {
    "none": lambda mask, world: None,
    "head-tail": lambda mask, world: _HeadTailLoadBalancer(N, world, "cpu"),
    "per document": lambda mask, world: _PerDocumentHeadTailLoadBalancer(DOCUMENTS, world, "cpu"),
    "round robin": lambda mask, world: _PTRRLoadBalancer(mask, world),
}


class Flex(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)


def bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Depends on the batch row, the head and the positions."""
    return score + 0.01 * (q - k) * (h + 1) - 0.1 * b


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> list[torch.Tensor]:
    """Dense reference in float64: out, lse and the gradients of the sum of their squares."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    index = [torch.arange(n) for n in (q.shape[0], q.shape[1], N, N)]
    b, h, i, j = (x.reshape([-1 if d == n else 1 for d in range(4)]) for n, x in enumerate(index))
    scores = bias(q @ k.mT * q.shape[-1] ** -0.5, b, h, i, j)
    scores = scores.masked_fill(~mask.mask_mod(b, h, i, j), float("-inf"))
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    grads = torch.autograd.grad(out.square().sum() + lse.square().sum(), (q, k, v))
    return [x.detach() for x in (out, lse, *grads)]


def flex(rank: int, mask_name: str, balancer_name: str) -> None:
    mesh, whole, mask = mesh_of_all(), qkv(N, heads=2), MASKS[mask_name]()
    want = dense(*whole, mask)
    balancer = BALANCERS[balancer_name](mask, mesh.size())
    style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
    attention = parallelize_module(Flex(), mesh, style)
    *shards, mask_shard = _context_parallel_shard(mesh, [*whole, mask], [2, 2, 2, 0], balancer)
    q, k, v = (x.requires_grad_() for x in shards)
    out, aux = attention(q, key=k, value=v, score_mod=bias, block_mask=mask_shard, return_aux=AuxRequest(lse=True))
    (out.square().sum() + aux.lse.square().sum()).backward()
    got = context_parallel_unshard(mesh, [out, aux.lse, q.grad, k.grad, v.grad], [2] * 5, balancer)
    for one, expected in zip(got, want, strict=True):
        assert_near(one, expected)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("mask", MASKS)
def test_flex_attention_in_a_module(pools: Pools, mask: str, balancer: str, world: int) -> None:
    if mask == "causal" and balancer == "per document":
        pytest.skip("this mask has no documents")
    pools(world).run(flex, mask, balancer)


ROWS = [[32, 64, 64], [100, 60]]
LONG_DOCUMENTS: dict[str, Callable[[BlockMask, int], _LoadBalancer | None]] = {
    "none": lambda mask, world: None,
    "head-tail": lambda mask, world: _HeadTailLoadBalancer(N, world, "cpu"),
    "per document": lambda mask, world: _PerDocumentHeadTailLoadBalancer(ROWS, world, "cpu"),
    "round robin": lambda mask, world: _PTRRLoadBalancer(mask, world),
}


def rows_of_documents(rank: int, balancer_name: str) -> list[str]:
    """Rows with different documents, and without a score_mod. Returns the masks that were planned."""
    mesh, mask = mesh_of_all(), documents_mask(ROWS, block=BLOCK)
    q, k, v = (x.double().requires_grad_() for x in qkv(N, heads=2))
    seen = torch.zeros(2, 1, N, N, dtype=torch.bool)
    for row, lengths in enumerate(ROWS):
        ends = torch.tensor(lengths).cumsum(0)
        for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            seen[row, :, start:stop, start:stop] = True
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~(seen & torch.ones(N, N, dtype=torch.bool).tril()), -torch.inf)
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    want = [out, lse, *torch.autograd.grad(out.square().sum() + lse.square().sum(), (q, k, v))]
    balancer = LONG_DOCUMENTS[balancer_name](mask, mesh.size())
    attention = parallelize_module(Flex(), mesh, _ContextParallel(2, _ContextParallel.AttentionType.FLEX))
    *shards, mine = _context_parallel_shard(mesh, [q.detach(), k.detach(), v.detach(), mask], [2, 2, 2, 0], balancer)
    q, k, v = (x.requires_grad_() for x in shards)
    with patch.object(context_parallel_module, "plan", wraps=context_parallel_module.plan) as planned:
        got, got_lse = attention(q, k, v, block_mask=mine, return_lse=True)
    (got.square().sum() + got_lse.square().sum()).backward()
    parts = context_parallel_unshard(mesh, [got, got_lse, q.grad, k.grad, v.grad], [2] * 5, balancer)
    for one, expected in zip(parts, want, strict=True):
        assert_close(one, expected.detach(), rtol=1e-12, atol=1e-12)
    return [call.args[0].name for call in planned.call_args_list]


@pytest.mark.parametrize("balancer", LONG_DOCUMENTS)
def test_rows_with_different_documents_are_planned_as_one_batch_of_bands(pools: Pools, balancer: str) -> None:
    for planned in pools(2).run(rows_of_documents, balancer):
        assert planned == [f"per_row(2 rows of {N} tokens)"]


def in_a_block(rank: int, tokens: int) -> None:
    """Also for sequences shorter than a block of the mask. The BlockMask is that of the whole sequence."""
    mesh, (q, k, v) = mesh_of_all(), qkv(tokens)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cpu")
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    everything = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        out, full = flex_attention(q, k, v, block_mask=mask), flex_attention(q, k, v)
    got = context_parallel_unshard(mesh, [out, full], [2, 2])
    assert_near(got[0], want)
    assert_near(got[1], everything)


@pytest.mark.parametrize("tokens", [9, 200])
def test_flex_attention_in_a_block(pools: Pools, tokens: int) -> None:
    pools(2).run(in_a_block, tokens)


def lengths_that_do_not_fit(rank: int) -> None:
    """The error is of the class that the installed torch raises: ValueError, and from 2.14 on RuntimeError."""
    mesh, whole, mask = mesh_of_all(), qkv(N), MASKS["causal"]()
    with pytest.raises((ValueError, RuntimeError)) as torchs:
        flex_attention(*(x[:, :, :32] for x in whole), block_mask=mask)
    style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
    attention = parallelize_module(Flex(), mesh, style)
    *shards, mask_shard = _context_parallel_shard(mesh, [*whole, mask], [2, 2, 2, 0])
    for _ in range(2):  # the second time the ranks have agreed on the plan
        with pytest.raises(torchs.type, match="8 queries"):
            attention(*(x[:, :, :8] for x in shards), block_mask=mask_shard)
        attention(*shards, block_mask=mask_shard)
    q, k, v = (x[:, :, :32].clone() for x in whole)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3), pytest.raises(torchs.type, match="160"):
        flex_attention(q, k, v, block_mask=mask)


def test_lengths_that_do_not_fit(pools: Pools) -> None:
    pools(2).run(lengths_that_do_not_fit)


def queries_of_another_sequence(rank: int) -> None:
    """A mask whose queries and keys are two sequences, both contiguous."""
    mesh, (q, k, v) = mesh_of_all(), qkv(48, keys=N, heads=2)
    mask = create_block_mask(lambda b, h, i, j: 3 * i >= j, None, None, 48, N, device="cpu", BLOCK_SIZE=BLOCK)
    allowed = 3 * torch.arange(48)[:, None] >= torch.arange(N)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=allowed)
    attention = parallelize_module(Flex(), mesh, _ContextParallel(2, _ContextParallel.AttentionType.FLEX))
    *shards, mask_shard = _context_parallel_shard(mesh, [q, k, v, mask], [2, 2, 2, 0])
    out = attention(*(x.clone() for x in shards), block_mask=mask_shard)
    assert_near(context_parallel_unshard(mesh, [out], [2])[0], want)


@pytest.mark.parametrize("world", [2, 4])
def test_queries_of_another_sequence(pools: Pools, world: int) -> None:
    pools(world).run(queries_of_another_sequence)
