"""Attention in a ``context_parallel`` block, over gloo processes: exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import ringspan as rs
from ringspan.compat import (
    _context_parallel_shard,
    _ContextParallel,
    _HeadTailLoadBalancer,
    context_cache,
    context_parallel,
    context_parallel_unshard,
)
from tests.compat.jobs import assert_near, mesh_of_all, options, qkv, single_process
from tests.conftest import Pools

sdpa = F.scaled_dot_product_attention


def in_a_block(rank: int, tokens: int, is_causal: bool, balance: bool, rotation: str, backend: str) -> None:
    """The sequence of torch's own test: buffers sharded in place, backward inside the block, unsharding after it."""
    mesh, whole = mesh_of_all(), qkv(tokens)
    expected, expected_grads = single_process(*whole, is_causal=is_causal)
    q, k, v = (x.clone() for x in whole)
    with options(balance=balance, rotation=rotation):
        with context_parallel(mesh, buffers=(q, k, v), buffer_seq_dims=(2, 2, 2)), sdpa_kernel(getattr(SDPBackend, backend)):
            for x in (q, k, v):
                x.requires_grad = True
            out = sdpa(q, k, v, is_causal=is_causal)
            out.square().sum().backward()
            grads = [q.grad, k.grad, v.grad]
            for x in (q, k, v):
                x.requires_grad = False
            with torch.no_grad():
                assert torch.equal(sdpa(q, k, v, is_causal=is_causal), out)
        assert all(torch.equal(x, was) for x, was in zip((q, k, v), whole, strict=True))
        (got,) = context_parallel_unshard(mesh, [out], [2])
        got_grads = context_parallel_unshard(mesh, grads, [2, 2, -2])
    assert_near(got, expected)
    for got_grad, expected_grad in zip(got_grads, expected_grads, strict=True):
        assert_near(got_grad, expected_grad)


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize("balance", [True, False], ids=["balanced", "contiguous"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("world", "tokens"), [(2, 64), (4, 64), (2, 37), (4, 37), (4, 3)])
def test_attention_in_a_block(pools: Pools, world: int, tokens: int, is_causal: bool, balance: bool, rotation: str) -> None:
    """Includes lengths that the world size does not divide, and ranks without tokens."""
    pools(world).run(in_a_block, tokens, is_causal, balance, rotation, "MATH")


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_any_sdpa_backend_can_be_requested(pools: Pools, backend: str) -> None:
    pools(2).run(in_a_block, 16, True, True, "allgather", backend)


# -- lengths, nesting, other arguments ------------------------------------------------------------------------------


def no_buffers(rank: int) -> None:
    """The switch says the order: contiguous, in shards of any size, or head-tail."""
    mesh, whole = mesh_of_all(), qkv(9)
    for is_causal in (True, False):
        q, k, v = (x.tensor_split([1 + 2 * r for r in range(mesh.size() - 1)], dim=2)[rank] for x in whole)
        with options(balance=False):
            with context_parallel(mesh):
                out = sdpa(q, k, v, is_causal=is_causal)
            assert_near(context_parallel_unshard(mesh, [out], [2])[0], single_process(*whole, is_causal=is_causal)[0])
    with context_parallel(mesh), pytest.raises(rs.InputError, match=r"in head-tail order.*set it to False"):
        sdpa(q, k, v, is_causal=True)


def two_lengths(rank: int) -> None:
    """Cross-attention between two buffers of a block. On some ranks the two shards have the same size."""
    mesh, (q, k, v) = mesh_of_all(), qkv(9, keys=10)
    want = [single_process(q, k, v, is_causal=is_causal)[0] for is_causal in (True, False)]
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        crossed = [sdpa(q, k, v, is_causal=is_causal) for is_causal in (True, False)]
    for got, expected in zip(context_parallel_unshard(mesh, crossed, [2, 2]), want, strict=True):
        assert_near(got, expected)


def nested(rank: int) -> None:
    mesh, (q, k, v), (a, b, c) = mesh_of_all(), qkv(12), qkv(7)
    want = single_process(q, k, v, is_causal=True)[0], single_process(a, b, c, is_causal=False)[0]
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        first = sdpa(q, k, v, is_causal=True)
        with options(balance=False):
            with context_parallel(mesh, buffers=[a, b, c], buffer_seq_dims=[2] * 3):
                inner = sdpa(a, b, c)
            assert_near(context_parallel_unshard(mesh, [inner], [2])[0], want[1])
        with context_parallel(mesh):
            again = sdpa(q, k, v, is_causal=True)
        with rs.local_attention():
            assert sdpa(q, k, v).shape == q.shape
        last = sdpa(q, k, v, is_causal=True)
        assert torch.equal(first, again)
        assert torch.equal(first, last)
        assert_near(context_parallel_unshard(mesh, [first], [2])[0], want[0])
    assert q.shape[2] == 12


def grouped_heads_and_scale(rank: int) -> None:
    mesh, (q, k, v) = mesh_of_all(), qkv(10)
    k, v = k[:, :2].clone(), v[:, :2].clone()
    want = sdpa(q.double(), k.double(), v.double(), is_causal=True, scale=0.2, enable_gqa=True)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        out = sdpa(query=q, key=k, value=v, is_causal=True, scale=0.2, enable_gqa=True)
    assert_near(context_parallel_unshard(mesh, [out], [2])[0], want)


def multi_head_attention(rank: int) -> None:
    """nn.MultiheadAttention projects this rank's tokens, in training and in evaluation."""
    mesh, hidden = mesh_of_all(), ~torch.ones(12, 12).tril().bool()
    for training in (True, False):
        torch.manual_seed(0)
        module = nn.MultiheadAttention(16, 4, batch_first=True).train(training)
        x = torch.randn(2, 12, 16)
        want = module(x, x, x, attn_mask=hidden, need_weights=False)[0]
        exact = torch.autograd.grad(want.square().sum(), module.in_proj_weight)[0]
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            out = module(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
            grad = torch.autograd.grad(out.square().sum(), module.in_proj_weight)[0]
        dist.all_reduce(grad)
        assert_near(context_parallel_unshard(mesh, [out.detach()], [1])[0], want.double())
        torch.testing.assert_close(grad, exact, atol=1e-4, rtol=1e-5)


def contexts_are_made_once(rank: int) -> None:
    """Only the first call in a block or a module makes a ContextParallel."""
    mesh, made, (q, k, v) = mesh_of_all(), [], qkv(12)
    module = parallelize_module(Attends(), mesh, _ContextParallel(2, _ContextParallel.AttentionType.SDPA))
    shards = _context_parallel_shard(mesh, qkv(12), [2] * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            context_cache, "ContextParallel", lambda *args, **how: made.append(args) or rs.ContextParallel(*args, **how)
        )
        for _ in range(3):
            module(*shards)
        assert len(made) == 1
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
            for is_causal in (True, False, True):
                sdpa(q, k, v, is_causal=is_causal)
        assert len(made) == 1 + 2


class Attends(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, is_causal=True)


JOBS = [
    contexts_are_made_once,
    no_buffers,
    two_lengths,
    nested,
    grouped_heads_and_scale,
    multi_head_attention,
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("job", JOBS, ids=[job.__name__ for job in JOBS])
def test_attention(pools: Pools, job: Callable[..., None], world: int) -> None:
    pools(world).run(job)


def compiled(rank: int) -> None:
    """Buffers of one length: forward and backward compile to one graph. Several lengths: there are graph breaks."""
    mesh, whole = mesh_of_all(), qkv(10)

    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q * 2, k, v, is_causal=True) * 1.0

    expected, expected_grads = single_process(whole[0] * 2, *whole[1:], is_causal=True)
    q, k, v = (x.clone() for x in whole)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        for x in (q, k, v):
            x.requires_grad = True
        out = torch.compile(twice, backend="aot_eager", fullgraph=True)(q, k, v)
        out.square().sum().backward()
        assert q.grad is not None
        dq, of_unknown_length = q.grad / 2, [x.detach().clone() for x in (q, k, v)]
        with context_parallel(mesh, buffers=[torch.zeros(3), torch.zeros(10)], buffer_seq_dims=[0, 0]):
            with_graph_breaks = torch.compile(twice, backend="eager")(*of_unknown_length)
    got = context_parallel_unshard(mesh, [out, with_graph_breaks, dq], [2] * 3)
    for actual, reference in zip(got, [expected, expected, expected_grads[0]], strict=True):
        assert_near(actual, reference)


def test_compiled_attention(pools: Pools) -> None:
    pools(2).run(compiled)


# -- refusals ----------------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Callable[[Any, list[torch.Tensor]], Any], type[Exception], str]] = {
    "attn_mask": (
        lambda mesh, x: sdpa(*x, attn_mask=torch.ones(4, 4).bool()),
        rs.UnplannedAttention,
        r"attn_mask of shape.*Use `with rs.ContextParallel\(mesh, mask\):` instead of context_parallel, and call without",
    ),
    "dropout": (lambda mesh, x: sdpa(*x, dropout_p=0.1), rs.UnplannedAttention, "dropout_p=0.1"),
    "MultiheadAttention": (
        lambda mesh, x: nn.MultiheadAttention(8, 2)(*[torch.randn(1, 4, 8)] * 3),
        rs.UnplannedAttention,
        "need_weights=False",
    ),
    "varlen_attn": (
        lambda mesh, x: varlen_attn(*(y[0].transpose(0, 1) for y in x), *[torch.tensor([0, 8])] * 2, 8, 8),
        rs.UnplannedAttention,
        "rs.ContextParallel.*rs.documents",
    ),
    "another length": (lambda mesh, x: sdpa(*qkv(9)), rs.PeerMismatch, "has 9 queries where the plan says 4"),
    "none of two lengths": (
        lambda mesh, x: in_a_block_of_two_lengths(mesh, lambda: sdpa(*qkv(501))),
        ValueError,
        "together have 1002 tokens, but the buffers of the context_parallel block have 8, 10",
    ),
}


def in_a_block_of_two_lengths(mesh: Any, call: Callable[[], Any]) -> None:
    with context_parallel(mesh, buffers=[torch.zeros(10)], buffer_seq_dims=[0]):
        call()


def refused(rank: int, name: str) -> None:
    call, kind, message = CALLS[name]
    mesh, x = mesh_of_all(), qkv(8)
    before = [one.clone() for one in x]
    with context_parallel(mesh, buffers=x, buffer_seq_dims=[2] * 3), pytest.raises(kind, match=message):
        call(mesh, x)
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_would_not_be_exact_raise(pools: Pools, name: str) -> None:
    pools(2).run(refused, name)


# -- messages ----------------------------------------------------------------------------------------------------------


def count_messages(rank: int, rotation: str) -> None:
    """CommDebugMode counts as many sends and receives as the plan has, forward and backward: those of docs/compat.md."""
    mesh, (q, k, v) = mesh_of_all(), qkv(32)
    documented = {"allgather": {"forward": 2, "backward": 4}, "alltoall": {"forward": 1, "backward": 2}}[rotation]
    plan = rs.plan(
        rs.causal(32),
        world=mesh.size(),
        rank=rank,
        layout="zigzag",
        strategy={"allgather": "gather", "alltoall": "ring"}[rotation],
    )
    c10d = torch.ops.c10d
    with options(rotation=rotation), context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        for x in (q, k, v):
            x.requires_grad = True
        sdpa(q, k, v, is_causal=True)  # the first call has the handshake
        for part, steps in (("forward", plan.program.forward), ("backward", plan.program.backward)):
            with CommDebugMode() as counter:
                if part == "forward":
                    out = sdpa(q, k, v, is_causal=True)
                else:
                    out.sum().backward()
            sends = sum(len(step.sends) for step in steps)
            recvs = sum(len(step.recvs) for step in steps)
            assert dict(counter.get_comm_counts()) == {c10d.send: sends, c10d.recv_: recvs}, (part, counter.get_comm_counts())
            assert counter.get_total_counts() == 2 * sends == 2 * documented[part] * (mesh.size() - 1)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_messages_are_those_of_the_plan(pools: Pools, rotation: str, world: int) -> None:
    pools(world).run(count_messages, rotation)


def count_flex_messages(rank: int) -> None:
    """With alltoall, keys are sent no further than to the last rank that sees them."""
    mesh, lengths = mesh_of_all(), [32] * 4
    ids = torch.arange(4).repeat_interleave(32)
    block_mask = create_block_mask(
        lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q), 1, 1, 128, 128, device="cpu", BLOCK_SIZE=16
    )
    module = parallelize_module(FlexAttends(), mesh, _ContextParallel(2, _ContextParallel.AttentionType.FLEX))
    balancer = _HeadTailLoadBalancer(128, mesh.size(), "cpu")
    whole = [x.requires_grad_() for x in qkv(128)]
    *shards, mine = _context_parallel_shard(mesh, [*whole, block_mask], [2] * 4, balancer)
    plan = rs.plan(rs.documents(lengths), world=4, rank=rank, layout="zigzag", strategy="ring")
    for rotation, sends in (("allgather", [6, 12]), ("alltoall", [2, 4])):
        with options(rotation=rotation):
            module(*shards, mine)  # the first call has the handshake
            with CommDebugMode() as forward:
                out = module(*shards, mine)
            with CommDebugMode() as backward:
                out.sum().backward(retain_graph=True)
        assert [counter.get_comm_counts()[torch.ops.c10d.send] for counter in (forward, backward)] == sends
    assert sends == [sum(len(step.sends) for step in steps) for steps in (plan.program.forward, plan.program.backward)]


class FlexAttends(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask) -> torch.Tensor:
        return flex_attention(q, k, v, block_mask=block_mask)  # type: ignore[return-value]


def test_messages_of_flex_attention(pools: Pools) -> None:
    pools(4).run(count_flex_messages)
