"""NaN and infinities in one document change no bit of the others: results and gradients, every kernel for CPUs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from ringspan.kernels.containment import independent_parts, is_one_part
from ringspan.masks import Band
from tests.hypothesis_strategies import Drawn, masks, parts

KERNELS = ["cpu", "eager", "reference"]
POISONS = [torch.nan, torch.inf, -torch.inf, 1e30]
NAMES = ["q", "k", "v", "dout", "dlse"]
H, G, D, E = 4, 2, 8, 6


def no_change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + 0.25 * (q - k)


def run(mask: rs.Mask, given: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Return the results and gradients of whole sequences, by name."""
    q, k, v = (given[name].clone().requires_grad_() for name in "qkv")
    world = rs.LocalWorld(options.pop("world", 1))  # type: ignore[arg-type]
    out, lse = world.attention(q, k, v, mask=mask, return_lse=True, **options)  # type: ignore[call-overload]
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (given["dout"], given["dlse"]))
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def tensors(q_len: int, k_len: int, dtype: torch.dtype) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    sizes = {"q": (H, q_len, D), "k": (G, k_len, D), "v": (G, k_len, E), "dout": (H, q_len, E), "dlse": (H, q_len)}
    made = {name: torch.randn(2, *size, generator=source) for name, size in sizes.items()}
    return {name: x if name == "dlse" and dtype != torch.float64 else x.to(dtype) for name, x in made.items()}


def documents_of(truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the document of each query and key: the connected components of the visible pairs, found by brute
    force."""
    q_len, k_len = truth.shape
    of_q, of_k = np.arange(q_len), np.arange(q_len, q_len + k_len)
    for _ in range(q_len + k_len):
        before = of_q.copy(), of_k.copy()
        for i, j in zip(*truth.nonzero(), strict=True):
            of_q[i] = of_k[j] = min(of_q[i], of_k[j])
        if all(np.array_equal(a, b) for a, b in zip(before, (of_q, of_k), strict=True)):
            break
    return of_q, of_k


def assert_contained(
    mask: rs.Mask, truth: np.ndarray, *, where: str, token: int, poison: float, dtype: torch.dtype, **options: object
) -> None:
    given = tensors(truth.shape[0], truth.shape[1], dtype)
    clean = run(mask, given, **options)
    of_q, of_k = documents_of(truth)
    rows = of_k if where in ("k", "v") else of_q
    token %= len(rows)
    given[where][-1, -1, token] = poison
    found = run(mask, given, **options)
    others = {"out": of_q, "lse": of_q, "dq": of_q, "dk": of_k, "dv": of_k}
    for name, of_row in others.items():
        other = torch.from_numpy(of_row != rows[token])
        assert torch.equal(found[name][:, :, other], clean[name][:, :, other]), f"{name} of another document has changed"
    if poison != poison and where in ("k", "v"):
        sees = torch.from_numpy(truth[:, token])
        assert found["out"][-1, -1, sees].isnan().any(-1).all(), "a NaN is lost"


@st.composite
def document_masks(draw: st.DrawFn) -> Drawn:
    """Draw documents of a few tokens, causal or not, with or without a window, in order or interleaved."""
    n = draw(st.integers(2, 40))
    lengths = draw(parts(n, draw(st.integers(2, 8))))
    causal = draw(st.booleans())
    ids = np.repeat(np.arange(len(lengths)), lengths)
    if draw(st.booleans()):
        ids = ids % 3
        mask = rs.documents(ids=ids.tolist(), causal=causal)
    else:
        mask = rs.documents(lengths, causal=causal)
    if draw(st.booleans()):
        mask = mask & rs.window(left=draw(st.integers(0, 4)), right=draw(st.integers(0, 2)))
    return Drawn(mask, mask.dense())


@pytest.mark.parametrize("backend", KERNELS)
@settings(deadline=None, max_examples=60)
@given(
    drawn=document_masks(),
    where=st.sampled_from(NAMES),
    token=st.integers(0, 100),
    poison=st.sampled_from(POISONS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    world=st.sampled_from([1, 2, 3]),
    strategy=st.sampled_from(["ring", "gather", "exchange", "pass_q", "ulysses"]),
    layout=st.sampled_from(["contiguous", "zigzag", "striped", "balanced"]),
    has_score_mod=st.booleans(),
)
def test_documents_are_contained(
    backend: str,
    drawn: Drawn,
    where: str,
    token: int,
    poison: float,
    dtype: torch.dtype,
    world: int,
    strategy: str,
    layout: str,
    has_score_mod: bool,
) -> None:
    score_mod = no_change if has_score_mod and backend == "eager" else None
    assert_contained(
        drawn.mask,
        drawn.truth,
        where=where,
        token=token,
        poison=poison,
        dtype=dtype,
        world=world,
        strategy=strategy,
        layout=layout,
        backend=backend,
        score_mod=score_mod,
    )


@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize("backend", KERNELS)
def test_small_documents_in_one_call(backend: str, where: str) -> None:
    """Documents that the CPU kernel computes in one call."""
    mask = rs.documents([5, 1, 9, 1, 1, 16])
    for token in (0, 5, 8, 15, 16, 30):
        assert_contained(
            mask,
            mask.dense(),
            where=where,
            token=token,
            poison=torch.nan,
            dtype=torch.float32,
            backend=backend,
            strategy="ring",
        )


def pairs_of(bands: tuple[Band, ...]) -> Iterator[tuple[int, int]]:
    for q0, q1, k0, k1, lo, hi in bands:
        yield from ((q, k) for q in range(q0, q1) for k in range(k0, k1) if lo <= k - q <= hi)


@given(masks(max_len=16))
def test_independent_parts_share_no_query_and_no_key(drawn: Drawn) -> None:
    found = independent_parts(drawn.mask.bands)
    of_q, of_k = documents_of(drawn.truth)
    documents = [{int(of_q[q]) for q, _ in pairs_of(part)} | {int(of_k[k]) for _, k in pairs_of(part)} for part in found]
    assert all(len(document) == 1 for document in documents)
    assert len({next(iter(document)) for document in documents}) == len(found)
    assert sorted(pair for part in found for pair in pairs_of(part)) == sorted(pairs_of(drawn.mask.bands))


@given(masks(max_len=16))
def test_one_part_has_no_other_queries_or_keys(drawn: Drawn) -> None:
    bands = drawn.mask.bands
    if not bands:
        return
    seen = drawn.truth[np.ix_(*(np.arange(min(b[i] for b in bands), max(b[i + 1] for b in bands)) for i in (0, 2)))]
    expected = len(independent_parts(bands)) == 1 and seen.any(0).all() and seen.any(1).all()
    assert is_one_part(bands) == expected
