"""Attention and collectives compare the calls of all ranks on a backend that matches messages by their order alone, as
NCCL does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.caching.by_stream import CAPTURING
from ringspan.kernels import cpu
from ringspan.kernels.reference import dense_attention
from ringspan.testing.assertions import assert_close
from ringspan.transports import ProcessGroupTransport, call_comparison, process_group
from ringspan.transports.call_comparison import PendingComparison, apply_comparison
from ringspan.transports.calls import Call
from tests.conftest import Pools

N, SCALES = 16, (0.5, 0.25)


def group_without_tags() -> ProcessGroupTransport:
    """Make gloo match messages by their order, and use its own collectives."""
    group = ProcessGroupTransport(dist.new_group(), timeout=20.0)
    group._has_tags = lambda device: False  # type: ignore[method-assign]
    group._state._has_tags = False
    group._state.calls.keep_checksums()
    return group


def two_calls(cp: rs.ContextParallel, x: Tensor, scales: tuple[float, float]) -> Tensor:
    """Two calls of one plan, whose messages have equal sizes."""
    q = cp.shard(x, dim=2)
    return cp.attention(cp.attention(q, q, q, scale=scales[0]), q, q, scale=scales[1])


def collectives(rank: int, differs: bool) -> list[object]:
    """Return the results of collectives after calls that were, or were not, the same on all ranks."""
    tag, Call.tag = Call.tag, lambda self, label, nbytes: 7  # type: ignore[method-assign, assignment, return-value]
    try:
        cp = rs.ContextParallel(group_without_tags(), rs.causal(N))
        x = torch.randn(1, 2, N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        two_calls(cp, x, SCALES)  # the handshake
        out = two_calls(cp, x, SCALES[::-1] if differs and rank == 1 else SCALES)
        mean, whole = cp.mean(out), cp.unshard(out, dim=2)
        out.sum().backward()
        try:
            cp.sum_gradients([x])
        except rs.PeerMismatch as error:
            return [mean.detach(), whole.detach(), str(error)]
        return [mean.detach(), whole.detach(), x.grad]
    finally:
        Call.tag = tag  # type: ignore[method-assign]


# On the contiguous layout of two ranks, neither needs rows of the other. Their calls are compared nevertheless.
MASKS = {"messages": rs.causal(N), "no messages": rs.documents([N // 2, N // 2])}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, N, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


def passes(rank: int, mask: rs.Mask, differs: bool) -> list[Tensor]:
    """Return out, lse and gradients of attention, without a collective. Rank 1 may use another scale."""
    tag, Call.tag = Call.tag, lambda self, label, nbytes: 7  # type: ignore[method-assign, assignment, return-value]
    try:
        plan, group = rs.plan(mask, world=2, rank=rank, layout="contiguous"), group_without_tags()
        q, k, v = (x.detach().chunk(2, dim=2)[rank].clone().requires_grad_() for x in inputs())
        rs.attention(q, k, v, plan=plan, group=group)  # the handshake
        scale = 0.25 if differs and rank == 1 else 0.5
        out, lse = rs.attention(q, k, v, plan=plan, group=group, scale=scale, return_lse=True)
        return [x.detach() for x in (out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)))]
    finally:
        Call.tag = tag  # type: ignore[method-assign]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_after_equal_calls_is_exact(pools: Pools, mask: rs.Mask) -> None:
    q, k, v = inputs()
    out, lse = dense_attention(q, k, v, torch.from_numpy(mask.dense()), scale=0.5)
    wanted = [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))]
    for rank, found in enumerate(pools(2).run(passes, mask, False)):
        for actual, whole in zip(found, wanted, strict=True):
            assert_close(actual, whole.chunk(2, dim=2)[rank], atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_after_different_calls_returns_no_number(pools: Pools, mask: rs.Mask) -> None:
    for found in pools(2).run(passes, mask, True):
        assert all(x.isnan().all() for x in found)


def order_of_a_rank(rank: int, mask: rs.Mask) -> list[str]:
    """Return what rank 0 or 1 does in forward and backward, in order."""
    order: list[str] = []
    start, attend, attend_backward = call_comparison.start_comparison, cpu.attend, cpu.attend_backward
    plan, group = rs.plan(mask, world=2, rank=rank, layout="contiguous"), group_without_tags()
    q, k, v = (x.detach().chunk(2, dim=2)[rank].clone().requires_grad_() for x in inputs())
    rs.attention(q, k, v, plan=plan, group=group)  # the handshake
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "start_comparison", lambda *args: order.append("comparison") or start(*args))
        patch.setattr(cpu, "attend", lambda *args, **options: order.append("kernel") or attend(*args, **options))
        patch.setattr(
            cpu, "attend_backward", lambda *args, **options: order.append("kernel") or attend_backward(*args, **options)
        )
        torch.autograd.grad(rs.attention(q, k, v, plan=plan, group=group).sum(), (q, k, v))
    return order


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_comparison_starts_before_the_kernels(pools: Pools, mask: rs.Mask) -> None:
    """Also on a rank without messages: the first messages of the others wait for it."""
    for order in pools(2).run(order_of_a_rank, mask):
        without_repetitions = [x for x, y in zip(order, ["", *order], strict=False) if x != y]
        assert without_repetitions == ["comparison", "kernel", "comparison", "kernel"]


def expected() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(1, 2, N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q = x
    for scale in SCALES:
        q = torch.nn.functional.scaled_dot_product_attention(q, x, x, is_causal=True, scale=scale)
    (grad,) = torch.autograd.grad(q.sum(), x)
    return q.detach().mean(), q.detach(), grad


def test_equal_calls_change_nothing(pools: Pools) -> None:
    for found in pools(2).run(collectives, False):
        for actual, wanted in zip(found, expected(), strict=True):
            assert_close(actual, wanted, atol=1e-12, rtol=0.0)


def test_no_number_follows_different_calls(pools: Pools) -> None:
    for mean, whole, error in pools(2).run(collectives, True):
        assert mean.isnan().all()
        assert whole.isnan().all()
        assert "different calls, as cp.sum_gradients found" in error


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2])
def test_results_that_cannot_be_filled_with_nan_raise(dtype: torch.dtype) -> None:
    x = torch.ones(3).to(dtype)
    apply_comparison(PendingComparison(torch.tensor(0.0), None), [x], "unshard")
    assert x.float().tolist() == [1.0] * 3
    with pytest.raises(rs.PeerMismatch, match="different calls, as unshard found"):
        apply_comparison(PendingComparison(torch.tensor(-2.0), None), [x], "unshard")


def test_the_host_does_not_wait_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for ``cp.roll`` of labels in a step that is captured in a CUDA graph."""
    x = torch.ones(3, dtype=torch.int64)
    monkeypatch.setattr(call_comparison, "stream_key", lambda device: CAPTURING)
    monkeypatch.setattr(Tensor, "item", lambda self: pytest.fail("the host waits for the device"))
    apply_comparison(PendingComparison(torch.tensor(0.0), None), [x], "cp.roll")


def test_groups_with_tags_keep_no_checksum(pools: Pools) -> None:
    """Messages of different calls do not match there."""
    assert pools(2).run(checksum_with_tags) == [0, 0]


def checksum_with_tags(rank: int) -> int:
    group = ProcessGroupTransport(dist.new_group())
    cp = rs.ContextParallel(group, rs.causal(N))
    cp.mean(cp.shard(torch.ones(N), dim=0))
    return group._state.calls.checksum
