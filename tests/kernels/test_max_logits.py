"""The largest logit of each head, by every way to compute it, against dense scores in float64."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.kernels import IndexedMods, eager, max_logits, mods_of, reference
from ringspan.kernels.mods import ScoreMod, for_all_pairs
from ringspan.testing.assertions import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, G, S, T, D = 2, 4, 2, 200, 150, 24

MASKS = {
    "full": rs.full(S, T),
    "causal": rs.causal(S, T, align="start"),
    "window": rs.causal(S, T, align="start") & rs.window(left=5),
    "hole": rs.full(S, T) - rs.Mask.from_bands([(10, 190, 20, 140, -S, T)], S, T),
    "nothing": rs.Mask.from_bands([], S, T),
}


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(S, B, H, D, dtype=torch.float64, device=DEVICE).to(dtype).permute(1, 2, 0, 3)
    return q, torch.randn(B, G, T, D, dtype=torch.float64, device=DEVICE).to(dtype)


def expected(q: Tensor, k: Tensor, mask: rs.Mask, scale: float, score_mod: ScoreMod | None = None) -> Tensor:
    score = q.double() @ k.double().repeat_interleave(H // G, 1).mT * scale
    if score_mod is not None:
        score = for_all_pairs(score_mod, given=1)(score, *(torch.arange(n, device=DEVICE) for n in score.shape))
    return score.masked_fill(~torch.from_numpy(mask.dense()).to(DEVICE), -torch.inf).amax((0, 2, 3))


def fused_max_logits(q: Tensor, k: Tensor, mask: rs.Mask, scale: float) -> Tensor:
    fused = pytest.importorskip("ringspan.kernels.fused_logits", reason="needs triton")
    if DEVICE == "cpu" and version("triton") < "3.7":
        pytest.skip("this interpreter of Triton has no loops from one loaded number to another")
    assert fused.supports(q)
    found: Tensor = fused.max_logits(q, k, mask.bands, scale=scale)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_eager_one_equals_dense_scores(mask: rs.Mask, dtype: torch.dtype) -> None:
    q, k = tensors(dtype)
    got = max_logits(reference, q, k, mask.bands, scale=0.3)  # type: ignore[arg-type]
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(got.double(), expected(q, k, mask, 0.3), rtol=1e-6 if dtype != torch.float64 else 1e-13, atol=0)


# Triton's interpreter cannot multiply bfloat16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_fused_one_equals_dense_scores(mask: rs.Mask, dtype: torch.dtype) -> None:
    q, k = tensors(dtype)
    assert_close(fused_max_logits(q, k, mask, 0.3).double(), expected(q, k, mask, 0.3), rtol=1e-5, atol=0)


def test_a_nan_is_found_where_it_is_visible_and_nowhere_else() -> None:
    mask = rs.documents([100, 100])
    q, k = torch.randn(2, 1, 2, 200, 16, device=DEVICE).unbind()
    q[0, 1, 150, 3] = torch.nan
    first = rs.Mask.from_bands(mask.bands[:1], 200)
    for compute in (fused_max_logits, lambda q, k, mask, scale: eager.max_logits(q, k, mask.bands, scale=scale)):
        assert compute(q, k, mask, 1.0).isnan().tolist() == [False, True]
        assert not compute(q, k, first, 1.0).isnan().any()


def test_a_score_mod_counts() -> None:
    q, k = tensors(torch.float64)
    mask, score_mod = MASKS["causal"], rs.softcap(2.0)
    mods = mods_of(score_mod, None, q)
    assert mods is not None
    tokens = [torch.arange(n, device=DEVICE) for n in (S, T)]
    got = max_logits(
        eager, q, k, mask.bands, scale=0.3, mods=IndexedMods(mods=mods, q_tokens_S=tokens[0], k_tokens_T=tokens[1])
    )  # type: ignore[arg-type]
    assert_close(got, expected(q, k, mask, 0.3, score_mod), rtol=1e-13, atol=0)
