"""Random mask_mods and score_mods, layouts, strategies and worlds: all that comes out, against the same functions, dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from tests.flex_reference import dense_flex
from tests.hypothesis_strategies import bijections

B, H, G, D, E = 2, 4, 2, 8, 6
EXACT = 1e-10
LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "round_robin", "balanced")
STRATEGIES = ("ring", "gather", "gather(stages=2)", "exchange", "pass_q", "ulysses", "hierarchical(per_node=2)", "auto")


class Drawn(NamedTuple):
    """A function, what it learns, and what it is called when a case fails."""

    function: Callable[..., Tensor] | None
    learned: tuple[Tensor, ...]
    name: str

    def __repr__(self) -> str:
        return self.name


def _ids(n: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (B, n), generator=source).sort(dim=-1).values


def _leaf(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def mask_mods(q_len: int, k_len: int) -> st.SearchStrategy[Drawn]:
    def drawn(kind: str, seed: int, reach: int) -> Drawn:
        ids, other = (
            _ids(max(q_len, k_len), seed),
            torch.randint(0, 3, (H, q_len + k_len), generator=torch.Generator().manual_seed(seed)),
        )
        functions: dict[str, Callable[..., Tensor]] = {
            "causal": lambda b, h, q, k: k <= q,
            "window": lambda b, h, q, k: (q - k).abs() <= reach,
            "documents": lambda b, h, q, k: (ids[0, q] == ids[0, k]) & (k <= q),
            "documents of each member": lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q),
            "of each head": lambda b, h, q, k: (q - k).abs() <= reach + 2 * h,
            "ragged": lambda b, h, q, k: (q * 3 + k * k + reach) % 5 < 3,
            "of each head and member": lambda b, h, q, k: (other[h, q + k] != b) | (q == k),
            "empty": lambda b, h, q, k: q < 0,
        }
        return Drawn(functions[kind], (), f"{kind} ({seed}, {reach})")

    kinds = ["causal", "window", "documents", "documents of each member", "of each head", "ragged", "of each head and member"]
    return st.builds(drawn, st.sampled_from([*kinds, "empty"]), st.integers(0, 99), st.integers(0, 9))


def score_mods(q_len: int, k_len: int) -> st.SearchStrategy[Drawn]:
    def drawn(kind: str, seed: int) -> Drawn:
        table, slopes, of_batch = _leaf(seed, H, q_len + k_len + 1), _leaf(seed, H), _leaf(seed, B)
        ids = _ids(max(q_len, k_len), seed)
        functions: dict[str, tuple[Callable[..., Tensor] | None, tuple[Tensor, ...]]] = {
            "none": (None, ()),
            "relative bias": (lambda score, b, h, q, k: score + table[h, k - q + q_len], (table,)),
            "of each head": (lambda score, b, h, q, k: score * slopes[h] - slopes[h].exp() * (q - k).abs() / 9, (slopes,)),
            "of each member": (lambda score, b, h, q, k: torch.tanh(score * of_batch[b]), (of_batch,)),
            "of documents": (lambda score, b, h, q, k: torch.where(ids[b, q] == ids[b, k], score, score - 1.5), ()),
            "hides": (lambda score, b, h, q, k: torch.where((q + 2 * k) % 3 == h % 3, -torch.inf, score), ()),
        }
        return Drawn(*functions[kind], f"{kind} ({seed})")

    kinds = ["none", "relative bias", "of each head", "of each member", "of documents", "hides"]
    return st.builds(drawn, st.sampled_from(kinds), st.integers(0, 99))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 24))
    lengths = (n, n) if draw(st.booleans()) else (n, draw(st.integers(1, 24)))
    world = draw(st.integers(1, 5))
    named = [name for name in LAYOUTS if name != "per_document" or lengths[0] == lengths[1]]
    return {
        "lengths": lengths,
        "mask_mod": draw(mask_mods(*lengths)),
        "score_mod": draw(score_mods(*lengths)),
        "block": draw(st.integers(1, 8)),
        "world": world,
        "layout": draw(st.sampled_from(named) | bijections(n, world)),
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "and_window": draw(st.none() | st.integers(0, 20)),
    }


@given(cases())
@settings(max_examples=120)
def test_any_functions_on_any_plan(case: dict[str, Any]) -> None:
    (q_len, k_len), sees, scores = case["lengths"], case["mask_mod"].function, case["score_mod"]
    mask = rs.mask_mod(sees, q_len, k_len, batch=B, heads=H, block=case["block"])
    left = case["and_window"]
    if left is not None:
        mask = mask & rs.window(left=left)
    leaves = [
        _leaf(n, B, heads, length, dim) for n, (heads, length, dim) in enumerate([(H, q_len, D), (G, k_len, D), (G, k_len, E)])
    ]
    got = rs.LocalWorld(case["world"]).attention(
        *leaves, mask=mask, score_mod=scores.function, layout=case["layout"], strategy=case["strategy"], return_lse=True
    )

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(b, h, q, k) & (True if left is None else q - k <= left)

    want = dense_flex(*leaves, visible, scores.function)
    assert torch.equal(got.lse.isneginf(), want.lse.isneginf())
    learned = [*leaves, *scores.learned]
    weights = [_leaf(7, *want.out.shape).detach(), _leaf(8, *want.lse.shape).detach().masked_fill(want.lse.isneginf(), 0.0)]
    mine, theirs = (torch.autograd.grad(x, learned, weights, allow_unused=True, materialize_grads=True) for x in (got, want))
    for is_, should in zip((*got, *mine), (*want, *theirs), strict=True):
        off = (is_ - should).masked_fill(should.isneginf(), 0.0).abs()
        assert off.max().item() <= EXACT * max(1.0, should.masked_fill(should.isneginf(), 0.0).abs().max().item())
