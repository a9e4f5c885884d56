"""The ready-made functions of scores and results, against their formulas on dense float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from tests.flex_reference import dense_flex, pairs

N, H = 37, 4


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, h, N, 8, dtype=torch.float64, requires_grad=True) for h in (H, 2, 2)]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def distances() -> Tensor:
    _, _, q, k = pairs(2, H, N, N)
    return k - q


SLOPES = torch.linspace(0.1, 0.4, H, dtype=torch.float64, requires_grad=True)
BIAS = torch.randn(H, 11, dtype=torch.float64, requires_grad=True)

CASES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor], list[Tensor]]] = {
    "softcap": (rs.softcap(1.5), lambda score: 1.5 * torch.tanh(score / 1.5), []),
    "alibi": (rs.alibi(SLOPES), lambda score: score - SLOPES[:, None, None] * distances().abs(), [SLOPES]),
    "relative bias": (
        rs.relative_bias(BIAS),
        lambda score: score + BIAS[torch.arange(H)[:, None, None], distances().clamp(-5, 5) + 5],
        [BIAS],
    ),
}


@pytest.mark.parametrize(("score_mod", "formula", "learned"), CASES.values(), ids=CASES)
def test_formula_and_gradients(score_mod: Any, formula: Callable[[Tensor], Tensor], learned: list[Tensor]) -> None:
    leaves = [*tensors(), *learned]
    got = rs.LocalWorld(3).attention(*leaves[:3], mask=rs.causal(N), score_mod=score_mod, return_lse=True, layout="zigzag")
    want = dense_flex(*leaves[:3], causal, lambda score, *_: formula(score))
    torch.testing.assert_close(got, want)
    dout, dlse = torch.randn_like(want.out), torch.randn_like(want.lse)
    torch.testing.assert_close(*(torch.autograd.grad(x, leaves, (dout, dlse)) for x in (got, want)))


def test_a_row_without_keys_and_without_a_sink_is_empty() -> None:
    lse, sink_H = torch.full((1, 2, 3), -torch.inf), torch.tensor([-torch.inf, 0.5], requires_grad=True)
    got = rs.with_sinks(torch.zeros(1, 2, 3, 4), lse, sink_H)
    assert (got.out == 0).all()
    assert got.lse[0, :, 0].tolist() == [-torch.inf, 0.5]
    (grad,) = torch.autograd.grad(got.out.sum(), sink_H)
    assert grad.tolist() == [0.0, 0.0]


def test_sinks_are_one_more_key_for_every_query() -> None:
    q, k, v = tensors()
    sink_H = torch.randn(H, dtype=torch.float64, requires_grad=True)
    mask = rs.causal(N) - rs.Mask.from_bands([(5, 9, 0, N, -N, N)], N)  # four queries see nothing but the sink
    result = rs.LocalWorld(3).attention(q, k, v, mask=mask, return_lse=True)
    got = rs.with_sinks(*result, sink_H)
    score = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(~torch.from_numpy(mask.dense()), -torch.inf)
    score = torch.cat([score, sink_H[:, None, None].expand(2, H, N, 1)], dim=-1)
    want = (score.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1), score.logsumexp(-1))
    torch.testing.assert_close(tuple(got), want)
    weights = [torch.randn_like(x) for x in want]
    torch.testing.assert_close(*(torch.autograd.grad(x, (q, k, v, sink_H), weights) for x in (tuple(got), want)))


@pytest.mark.parametrize("heads", [1, 6, 8])
def test_slopes_are_a_geometric_series(heads: int) -> None:
    slopes = rs.alibi_slopes(heads)
    torch.testing.assert_close(slopes, torch.tensor([2 ** (-8 * (n + 1) / heads) for n in range(heads)]))


RESULT = (torch.zeros(1, H, N, 8), torch.zeros(1, H, N))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rs.softcap(0.0), "a softcap is a positive number, not 0.0"),
        (lambda: rs.softcap("x"), "a softcap is a positive number, not 'x'"),  # type: ignore[arg-type]
        (lambda: rs.alibi_slopes("x"), "the number of query heads, at least 1; got 'x'"),  # type: ignore[arg-type]
        (lambda: rs.alibi_slopes(0), "the number of query heads, at least 1; got 0"),
        (lambda: rs.relative_bias(torch.zeros(2, 4)), r"an odd number of distances; got \(2, 4\)"),
        (lambda: rs.relative_bias(torch.zeros(5)), r"got \(5,\)"),
        (lambda: rs.relative_bias([[0.0] * 3]), "is a tensor .* got list"),  # type: ignore[arg-type]
        (lambda: rs.alibi(torch.zeros(4, 1)), r"one slope for each head, as rs.alibi_slopes\(heads\); got \(4, 1\)"),
        (lambda: rs.alibi([0.5]), "one slope for each head, .* got list"),  # type: ignore[arg-type]
        (lambda: rs.with_sinks(*RESULT, torch.zeros(3)), r"one score for each of the 4 query heads; got \(3,\)"),
        (lambda: rs.with_sinks(*RESULT, [0.0] * 4), "of the 4 query heads; got list"),  # type: ignore[arg-type]
    ],
)
def test_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(rs.InputError, match=message):
        make()
