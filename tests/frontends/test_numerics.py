"""The error against dense float64 does not grow with the number of ranks, nor with the size of the scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.kernels.reference import dense_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(n: int, dtype: torch.dtype, q_scale: float = 1.0) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 2, n, 64, generator=source).unbind()
    return [x.to(dtype) for x in (q * q_scale, k, v, dout)]


def results(attention: Attention, given: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def errors(attention: Attention, given: list[Tensor]) -> Tensor:
    """Return the relative root mean square error of out, dq, dk and dv."""
    seen = torch.from_numpy(rs.causal(given[0].shape[2]).dense())
    exact = results(lambda q, k, v: dense_attention(q, k, v, seen).out, [x.double() for x in given])
    found = results(attention, given)
    return torch.stack([(a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)])


def split(world: int, strategy: str, backend: str = "cpu") -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = rs.causal(q.shape[2])
        return rs.LocalWorld(world).attention(q, k, v, mask=mask, strategy=strategy, layout="zigzag", backend=backend)

    return attention


@pytest.mark.parametrize(
    ("world", "strategy", "backend"),
    [(16, "ring", "cpu"), (16, "ring", "eager"), (16, "pass_q", "cpu"), (16, "pass_q", "eager"), (64, "pass_q", "cpu")],
)
def test_huge_scores_are_as_exact_as_in_one_process(world: int, strategy: str, backend: str) -> None:
    """Scores and lse are several hundred here, so their rounding errors are large.

    Those of lse must not add up over the merges. Those of scores must be the same in both passes, so that they cancel.
    """
    given = inputs(512, torch.float32, q_scale=30.0)
    torch_alone = errors(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), given)
    ratio = errors(split(world, strategy, backend), given) / torch_alone
    assert ratio.isfinite().all()
    assert ratio.max() <= 1.2, ratio.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_the_error_of_half_precision_does_not_grow_with_the_ranks(strategy: str, dtype: torch.dtype) -> None:
    given = inputs(128, dtype)
    growth = errors(split(32, strategy), given) / errors(split(1, strategy), given)
    assert growth.isfinite().all()
    assert growth.max() <= 1.2, growth.tolist()
