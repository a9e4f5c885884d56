"""Layers computed tile by tile, against the same layers on all tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringspan as rs
from ringspan.testing.assertions import assert_close

N, WIDTH = 11, 4


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)).double()


@pytest.mark.parametrize("tokens", [1, 3, 11, 100])
@pytest.mark.parametrize("dim", [1, -2])
def test_result_and_gradients_are_those_of_all_tokens(tokens: int, dim: int) -> None:
    layer, x = mlp(), torch.randn(2, N, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, N, WIDTH, dtype=torch.float64)
    found, wanted = rs.tiled(layer, x, tokens=tokens, dim=dim), layer(x)
    assert_close(found, wanted, atol=1e-14, what="result")
    leaves = [x, *layer.parameters()]
    grads = [torch.autograd.grad((out * weights).sum(), leaves) for out in (found, wanted)]
    for mine, theirs in zip(*grads, strict=True):
        assert_close(mine, theirs, atol=1e-13, what="gradient")


def test_several_tensors_and_results() -> None:
    x, y = torch.randn(2, 2, N, WIDTH, dtype=torch.float64)
    total, product = rs.tiled(lambda a, b: (a + b, a * b), x, y, tokens=4)
    assert torch.equal(total, x + y)
    assert torch.equal(product, x * y)


def test_the_activations_of_one_tile_are_kept_at_a_time() -> None:
    layer, x = mlp(), torch.randn(2, N, WIDTH, dtype=torch.float64, requires_grad=True)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rs.tiled(layer, x, tokens=2)
    assert max(kept, default=0) <= 2 * 2 * WIDTH  # inputs of tiles; the hidden units would be 2 · 2 · 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: rs.tiled(nn.Identity(), tokens=2), "needs tensors"),
        (lambda x: rs.tiled(nn.Identity(), x, tokens=2, dim=3), "needs tensors that have dim 3"),
        (lambda x: rs.tiled(nn.Identity(), x, tokens=0), "tokens must be a positive number"),
        (lambda x: rs.tiled(torch.add, x, x[:, 1:], tokens=2), "the same number of tokens"),
        (lambda x: rs.tiled(lambda x: x.sum(1), x, tokens=2), "with its tokens on dim 1"),
        (lambda x: rs.tiled(lambda x: x.mT, x, tokens=2), "with its tokens on dim 1"),
    ],
)
def test_what_cannot_be_tiled_raises(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(rs.InputError, match=message):
        call(torch.randn(2, N, WIDTH))
