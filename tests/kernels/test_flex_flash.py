"""The replacement of saved tensors for the FLASH back end, with a fake of that back end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.kernels import Saved, flex_flash
from ringspan.kernels.partial import Partial

S, T, D = 5, 7, 4


class Flash(torch.autograd.Function):
    """Attention whose backward pass reads the saved out and lse, as that of flash attention does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        score = q @ k.mT
        lse = score.logsumexp(-1)
        out = score.softmax(-1) @ v
        ctx.save_for_backward(q, k, v, out, lse, *more)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *more = ctx.saved_tensors
        p = (q @ k.mT - lse.unsqueeze(-1)).exp()
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ dout, *[None] * len(more)


def part(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    return Partial(*Flash.apply(q, k, v))


def test_gradients_of_partial_results_add_up_to_those_of_the_whole() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, D, requires_grad=True) for n in (S, T, T))
    score = q @ k.mT
    out, lse = score.softmax(-1) @ v, score.logsumexp(-1)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (q, k, v), dout)
    saved = Saved(q.detach(), dout, out.detach(), lse.detach())
    parts = [
        flex_flash._gradients(part, saved, *(x.detach()[:, :, keys] for x in (k, v))) for keys in (slice(0, 3), slice(3, T))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], wanted[0])
    for n in (1, 2):
        torch.testing.assert_close(torch.cat([grads[n] for grads in parts], 2), wanted[n])


def test_a_computation_that_saves_no_out_and_lse_raises() -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Partial:
        return Partial((q @ k.mT).exp() @ v, (q @ k.mT).logsumexp(-1).detach())

    q, k, v = (torch.randn(1, 1, n, D) for n in (S, T, T))
    saved = Saved(q, torch.ones(1, 1, S, D), torch.zeros(1, 1, S, D), torch.zeros(1, 1, S))
    with pytest.raises(rs.KernelError, match=r'saved 0 and 0 of them: use backend="flex"'):
        flex_flash._gradients(plain, saved, k, v)
    assert not vars(flex_flash._thread)


def test_a_saved_tensor_that_looks_like_lse_raises() -> None:
    """Another release of PyTorch may save such a tensor."""

    def with_more(q: Tensor, k: Tensor, v: Tensor) -> Partial:
        return Partial(*Flash.apply(q, k, v, torch.ones(1, 1, S)))

    q, k, v = (torch.randn(1, 1, n, D) for n in (S, T, T))
    saved = Saved(q, torch.ones(1, 1, S, D), torch.zeros(1, 1, S, D), torch.zeros(1, 1, S))
    with pytest.raises(rs.KernelError, match="saved 1 and 2 of them"):
        flex_flash._gradients(with_more, saved, k, v)


def test_saved_tensor_hooks_of_the_user_stay_in_effect() -> None:
    q, k, v = (torch.randn(1, 1, n, D) for n in (S, T, T))
    out, lse = Flash.apply(q, k, v)
    saved = Saved(q, torch.ones_like(out), out, lse)
    with torch.autograd.graph.save_on_cpu():
        around = flex_flash._gradients(part, saved, k, v)
    for mine, theirs in zip(around, flex_flash._gradients(part, saved, k, v), strict=True):
        assert torch.equal(mine, theirs)
