"""The eager kernel against dense float64: bands, score_mod and mask_mod, their gradients, and rows that see no key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ringspan as rs
from ringspan.kernels import IndexedMods, Inputs, Mods, Saved, eager, mods_of, select_kernel
from ringspan.kernels.eager import MAX_ROWS
from ringspan.kernels.reference import dense_attention
from ringspan.user_functions.captures import captured_tensors
from tests.flex_reference import dense_flex, pairs
from tests.hypothesis_strategies import Drawn, masks

B, H, G, D, E = 2, 4, 2, 8, 5


def tensors(s: int, t: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, h, n, e, dtype=dtype, requires_grad=True) for h, n, e in ((H, s, D), (G, t, D), (G, t, E))]


@torch.no_grad()
def attend(q: Tensor, k: Tensor, v: Tensor, mask: rs.Mask, mods: IndexedMods | None = None) -> rs.Partial:
    out, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -torch.inf)
    total = rs.Partial(out.detach(), lse.detach())
    for start, stop, part in eager.attend(q.detach(), k.detach(), v.detach(), mask.bands, scale=0.3, mods=mods):
        rows = rs.merge(rs.Partial(*(x[:, :, start:stop] for x in total)), part)
        total.out[:, :, start:stop], total.lse[:, :, start:stop] = rows
    return total


def backward(saved: Saved, k: Tensor, v: Tensor, mask: rs.Mask, mods: IndexedMods | None = None) -> list[Tensor]:
    learned = () if mods is None else mods.mods.learned
    dq, dk, dv, *dlearned = (torch.zeros_like(x) for x in (saved.q_BHSD, k, v, *learned))
    for rows, dq_, keys, dk_, dv_, dlearned_ in eager.attend_backward(saved, k, v, mask.bands, scale=0.3, mods=mods):
        dq[:, :, rows] += dq_
        dk[:, :, keys] += dk_
        dv[:, :, keys] += dv_
        for total, part in zip(dlearned, dlearned_, strict=True):
            total.add_(part)
    return [dq, dk, dv, *dlearned]


@given(masks(20))
@settings(max_examples=40)
def test_any_mask(drawn: Drawn) -> None:
    q, k, v = tensors(*drawn.mask.lengths)
    want = dense_attention(q, k, v, torch.from_numpy(drawn.truth), scale=0.3)
    got = attend(q, k, v, drawn.mask)
    torch.testing.assert_close(got, rs.Partial(*(x.detach() for x in want)))
    dout, dlse = torch.randn_like(want.out), torch.randn_like(want.lse).masked_fill(want.lse == -torch.inf, 0.0)
    wanted = [torch.zeros_like(x) for x in (q, k, v)]
    if drawn.truth.any():
        wanted = list(torch.autograd.grad(want, (q, k, v), (dout, dlse)))
    mine = backward(Saved(q.detach(), dout, *got, dlse), k.detach(), v.detach(), drawn.mask)
    torch.testing.assert_close(mine, wanted)


def test_more_rows_than_one_block() -> None:
    n = 2 * MAX_ROWS + 17
    q, k, v = tensors(n, n)
    mask = rs.causal(n) & rs.window(left=40)
    want = dense_attention(q, k, v, torch.from_numpy(mask.dense()), scale=0.3)
    torch.testing.assert_close(attend(q, k, v, mask), rs.Partial(*(x.detach() for x in want)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_returned_in_float32(dtype: torch.dtype) -> None:
    q, k, v = tensors(9, 9, dtype)
    (part,) = eager.attend(q.detach(), k.detach(), v.detach(), rs.causal(9).bands, scale=0.3)
    want = dense_attention(q, k, v, torch.from_numpy(rs.causal(9).dense()), scale=0.3)
    assert part.partial.out.dtype == part.partial.lse.dtype == torch.float32
    torch.testing.assert_close(part.partial.out.double(), want.out.detach(), atol=1e-6, rtol=1e-6)


# -- score_mod and mask_mod --------------------------------------------------------------------------------------------


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope_H = nn.Parameter(torch.linspace(0.1, 1, H, dtype=torch.float64))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - self.slope_H[h] * (q - k).abs()


def bucket_bias(table_HR: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + table_HR[h, (k - q).clamp(-5, 5) + 5]


def in_closure() -> tuple[Callable[..., Tensor], list[Tensor]]:
    bias_B = torch.randn(B, dtype=torch.float64, requires_grad=True)
    return lambda score, b, h, q, k: score * bias_B[b], [bias_B]


def in_partial() -> tuple[Callable[..., Tensor], list[Tensor]]:
    table = torch.randn(H, 11, dtype=torch.float64, requires_grad=True)
    return functools.partial(bucket_bias, table), [table]


def in_module() -> tuple[Callable[..., Tensor], list[Tensor]]:
    module = Slopes()
    return module, [module.slope_H]


def in_history() -> tuple[Callable[..., Tensor], list[Tensor]]:
    """One captured tensor is computed from the other. Following the graph between them would count a gradient twice."""
    weight = torch.randn(H, dtype=torch.float64, requires_grad=True)
    derived = weight.exp()
    return lambda score, b, h, q, k: score * derived[h] + weight[h] * (k - q), [weight, derived]


LEARNED = {"closure": in_closure, "partial": in_partial, "module": in_module, "history": in_history}


@pytest.mark.parametrize("make", LEARNED.values(), ids=LEARNED)
def test_gradients_of_captured_tensors(make: Callable[[], Any]) -> None:
    score_mod, learned = make()
    q, k, v = tensors(21, 21)
    mask = rs.causal(21)
    mods = mods_of(score_mod, None, q)
    assert mods is not None
    assert {id(x) for x in mods.learned} == {id(x) for x in learned}
    indexed = IndexedMods(mods=mods, q_tokens_S=torch.arange(21), k_tokens_T=torch.arange(21))
    want = dense_flex(q, k, v, torch.from_numpy(mask.dense()), score_mod, scale=0.3)
    got = attend(q, k, v, mask, indexed)
    torch.testing.assert_close(got, rs.Partial(*(x.detach() for x in want)))
    dout = torch.randn_like(want.out)
    mine = backward(Saved(q.detach(), dout, *got), k.detach(), v.detach(), mask, indexed)
    # Autograd adds the gradient of ``derived`` to that of ``weight``. The kernel returns them apart, so add them here.
    leaves = [x for x in learned if x.is_leaf]
    wanted = torch.autograd.grad(want.out, (q, k, v, *leaves), dout, retain_graph=True)
    by_id = dict(zip(map(id, mods.learned), mine[3:], strict=True))
    derived = [x for x in learned if not x.is_leaf]
    added = torch.autograd.grad(derived, leaves, [by_id[id(x)] for x in derived]) if derived else [0.0] * len(leaves)
    torch.testing.assert_close(mine[:3], list(wanted[:3]))
    for leaf, whole, more in zip(leaves, wanted[3:], added, strict=True):
        torch.testing.assert_close(by_id[id(leaf)] + more, whole)


def test_functions_are_called_with_tokens_and_global_heads() -> None:
    """Rows and keys are in any order; heads count from ``first_head``."""
    q, k, v = tensors(13, 17)
    q_tokens, k_tokens = torch.randperm(40)[:13], torch.randperm(40)[:17]
    document = torch.randint(3, (40,))
    mods = Mods(
        score_mod=lambda score, b, h, q, k: score + 0.1 * h + 0.01 * (q - k) * (b + 1),
        mask_mod=lambda b, h, q, k: (document[q] == document[k]) | ((q + k + h) % 3 == b),
    )
    indexed = IndexedMods(mods=mods, q_tokens_S=q_tokens, k_tokens_T=k_tokens, first_head=7)
    b, h, i, j = pairs(B, H, 13, 17)
    i, j, h = q_tokens[i], k_tokens[j], h + 7
    seen = (document[i] == document[j]) | ((i + j + h) % 3 == b)
    want = dense_flex(q, k, v, seen, lambda score, *_: score + 0.1 * h + 0.01 * (i - j) * (b + 1), scale=0.3)
    torch.testing.assert_close(attend(q, k, v, rs.full(13, 17), indexed), rs.Partial(*(x.detach() for x in want)))


def test_a_score_of_minus_infinity_hides_the_pair() -> None:
    q, k, v = tensors(12, 12)
    mods = mods_of(lambda score, b, h, q, k: torch.where((k < q) & (q != 5), score, -torch.inf), None, q)
    assert mods is not None
    indexed = IndexedMods(mods=mods, q_tokens_S=torch.arange(12), k_tokens_T=torch.arange(12))
    got = attend(q, k, v, rs.full(12), indexed)
    assert got.lse.isneginf().nonzero()[:, 2].unique().tolist() == [0, 5]
    assert (got.out[:, :, [0, 5]] == 0).all()
    grads = backward(Saved(q.detach(), torch.ones_like(got.out), *got), k.detach(), v.detach(), rs.full(12), indexed)
    assert all(x.isfinite().all() for x in grads)
    assert (grads[0][:, :, [0, 5]] == 0).all()


def test_a_score_mod_that_ignores_the_score() -> None:
    q, k, v = tensors(6, 6)
    mods = mods_of(lambda score, b, h, q, k: torch.zeros_like(score), None, q)
    indexed = IndexedMods(mods=mods, q_tokens_S=torch.arange(6), k_tokens_T=torch.arange(6))  # type: ignore[arg-type]
    got = attend(q, k, v, rs.full(6), indexed)
    torch.testing.assert_close(got.out, v.detach().mean(2, keepdim=True).repeat_interleave(H // G, 1).expand_as(got.out))
    grads = backward(Saved(q.detach(), torch.ones_like(got.out), *got), k.detach(), v.detach(), rs.full(6), indexed)
    assert (grads[0] == 0).all()


def test_captured_tensors_exclude_arguments_and_intermediates() -> None:
    given_, held = torch.ones(3), torch.arange(3.0)
    assert [id(x) for x in captured_tensors(lambda x: (x + held).sum() + (x * 2)[held.long()], given_)] == [id(held)]
    assert captured_tensors(lambda x: x * 2 + 1, given_) == ()


def test_auto_takes_it_only_for_score_mod_and_mask_mod() -> None:
    inputs = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 8, "v_dim": 8}
    assert select_kernel("auto", Inputs(**inputs, has_mods=True)) is eager  # type: ignore[arg-type]
    assert select_kernel("auto", Inputs(**inputs)) is not eager  # type: ignore[arg-type]
    assert select_kernel("eager", Inputs(**inputs)) is eager  # type: ignore[arg-type]
    with pytest.raises(rs.KernelError, match='backend="cpu" supports neither score_mod nor mask_mod; use backend="auto"'):
        select_kernel("cpu", Inputs(**inputs, has_mods=True))  # type: ignore[arg-type]


@given(st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=10)
def test_no_batch_or_no_bands(rows: int, keys: int) -> None:
    q, k, v = tensors(rows, keys)
    assert list(eager.attend(q[:0], k[:0], v[:0], rs.full(rows, keys).bands, scale=1.0)) == []
    assert list(eager.attend(q, k, v, (), scale=1.0)) == []
