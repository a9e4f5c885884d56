"""Cross-entropy over a vocabulary, tile by tile and over all ranks, against F.cross_entropy in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import ringspan as rs
from ringspan.frontends.cross_entropy import check_cross_entropy, summed_cross_entropy
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools

N, WIDTH, VOCABULARY = 23, 4, 17


def given(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((2, N, WIDTH), (VOCABULARY, WIDTH)))
    targets = torch.randint(VOCABULARY, (2, N))
    targets[0, 3:9] = -100
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy((hidden @ weight.T).mT, targets, reduction=reduction)


@pytest.mark.parametrize("tokens", [1, 5, 46, 1024])
def test_loss_and_gradients_of_one_rank(tokens: int) -> None:
    hidden, weight, targets = given()
    found = summed_cross_entropy(hidden, weight, targets, -100, tokens)
    wanted = plain(hidden, weight, targets, "sum")
    assert_close(found, wanted, atol=1e-12, what="loss")
    for mine, theirs in zip(*(torch.autograd.grad(3 * x, (hidden, weight)) for x in (found, wanted)), strict=True):
        assert_close(mine, theirs, atol=1e-12, what="gradient")


def test_tokens_without_a_target_may_be_nan() -> None:
    hidden, weight, targets = given()
    wanted = torch.autograd.grad(summed_cross_entropy(hidden, weight, targets, -100, 7), (hidden, weight))
    with torch.no_grad():
        hidden[0, 3:9] = torch.nan
    found = torch.autograd.grad(summed_cross_entropy(hidden, weight, targets, -100, 7), hidden)[0]
    assert torch.equal(found, wanted[0])


def test_half_precision_is_as_exact_as_pytorchs() -> None:
    hidden, weight, targets = given(torch.bfloat16)
    found = summed_cross_entropy(hidden, weight, targets, -100, 8)
    exact = plain(hidden.double(), weight.double(), targets, "sum")
    assert found.dtype == torch.float32
    assert_close(found, exact, atol=0.0, rtol=5e-3, what="loss", check_dtype=False)
    for mine, theirs in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (found, exact)), strict=True):
        assert mine.dtype == torch.bfloat16
        assert_close(mine, theirs, atol=3e-2, rtol=1e-2, what="gradient")


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_what_is_needed(needs: tuple[bool, bool]) -> None:
    hidden, weight, targets = given()
    found = summed_cross_entropy(hidden.requires_grad_(needs[0]), weight.requires_grad_(needs[1]), targets, -100, 8)
    if any(needs):
        found.backward()
    assert [x.grad is not None for x in (hidden, weight)] == list(needs)


def test_no_gradient_is_computed_without_grad_mode() -> None:
    hidden, weight, targets = given()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        summed_cross_entropy(hidden, weight, targets, -100, 8)
    assert counter.get_total_flops() == 2 * targets.numel() * WIDTH * VOCABULARY  # of the logits


def over_ranks(rank: int, grads: str, total: int | None) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets = given()
    cp = rs.ContextParallel(None, rs.causal(N), layout="zigzag")
    mine = cp.shard(hidden.detach(), dim=1).requires_grad_()
    loss = cp.cross_entropy(mine, weight, cp.shard(targets, dim=1), tokens=3, total=total, grads=grads)  # type: ignore[arg-type]
    loss.backward()
    cp.sum_gradients([weight])
    assert mine.grad is not None
    assert weight.grad is not None
    return loss.detach(), cp.unshard(mine.grad, dim=1), weight.grad


@pytest.mark.parametrize(("grads", "total"), [("summed", None), ("averaged", None), ("summed", 80)])
def test_the_mean_of_all_ranks(pools: Pools, grads: str, total: int | None) -> None:
    hidden, weight, targets = given()
    wanted = plain(hidden, weight, targets, "sum") / (total or (targets >= 0).sum())
    wanted.backward()
    times = 3 if grads == "averaged" else 1
    for loss, dhidden, dweight in pools(3).run(over_ranks, grads, total):
        assert_close(loss, wanted.detach(), atol=1e-13, what="loss")
        assert_close(dhidden, hidden.grad * times, atol=1e-13, what="gradient of hidden")  # type: ignore[operator]
        assert_close(dweight, weight.grad * times, atol=1e-13, what="gradient of weight")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, t: (h, w, t, 0), "tokens must be a positive number"),
        (lambda h, w, t: (h, w.T, t, 8), r"needs hidden \(…, D\), weight \(V, D\) and targets"),
        (lambda h, w, t: (h, w, t[:1], 8), r"needs hidden \(…, D\), weight \(V, D\) and targets"),
        (lambda h, w, t: (h, w, t.tolist(), 8), "targets must be a tensor; got list"),
    ],
)
def test_invalid_arguments(change: Callable[..., Any], message: str) -> None:
    with pytest.raises(rs.InputError, match=message):
        check_cross_entropy(*change(*given()))


def test_second_derivatives_raise() -> None:
    hidden, weight, targets = given()
    loss = summed_cross_entropy(hidden, weight, targets, -100, 8)
    with pytest.raises(rs.InputError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("weight", "targets", "said"),
    [
        (torch.nn.Linear(4, 5), torch.zeros(8, dtype=torch.long), r"not a module: give layer\.weight"),
        (torch.randn(5, 4), torch.full((8,), 7), r"a target is not in 0 … 4, the rows of weight, and not ignore_index=-100"),
        (torch.randn(5, 4), torch.full((8,), -1), r"a target is not in 0 … 4"),
        (torch.randn(5, 4), torch.zeros(8), r"targets must be integers"),
    ],
)
@pytest.mark.usefixtures("world_of_one")
def test_invalid_arguments_are_named(weight: Any, targets: torch.Tensor, said: str) -> None:
    cp = rs.ContextParallel(None, rs.causal(8))
    with pytest.raises(rs.InputError, match=said):
        cp.cross_entropy(torch.randn(8, 4), weight, targets)
