"""FlexAttention with its FLASH back end on a CUDA device against dense float64."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.kernels import Inputs, availability
from ringspan.kernels.flex_flash import auto_skip_reason
from ringspan.kernels.reference import dense_attention
from tests.kernels.compare import MASKS, compared, error

pytestmark = pytest.mark.gpu

# dtype, (query heads, key heads), head dim
KINDS = {
    "bfloat16, shared heads, 128": (torch.bfloat16, (8, 2), 128),
    "float16, 64": (torch.float16, (4, 4), 64),
}
CASES = {f"{kind}: {name}": (*KINDS[kind], mask) for kind in KINDS for name, mask in MASKS.items()}


def inputs(mask: rs.Mask, dtype: torch.dtype, heads: tuple[int, int], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    wanted = Inputs(device=torch.device("cuda"), dtype=dtype, head_dim=dim, v_dim=dim)
    reason = dict(availability(wanted))["flex_flash"]
    if reason != auto_skip_reason(wanted):
        pytest.skip(f"flex_flash {reason}")
    torch.manual_seed(0)
    (rows, cols), (h, g) = mask.lengths, heads
    q, k, v = (
        torch.randn(2, n, t, dim, device="cuda", dtype=dtype, requires_grad=True) for n, t in ((h, rows), (g, cols), (g, cols))
    )
    return q, k, v


@pytest.mark.parametrize(("dtype", "heads", "dim", "mask"), CASES.values(), ids=CASES)
def test_error_is_at_most_twice_that_of_plain_attention(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, mask: rs.Mask
) -> None:
    q, k, v = inputs(mask, dtype, heads, dim)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Triton computes these gradients")
        for each in compared(q, k, v, mask, lse=1e-3, backend="flex_flash"):
            assert each.error <= 2 * each.yardstick


@pytest.mark.parametrize("mask", [MASKS["causal"], MASKS["documents"]])
def test_score_mod_is_called_with_global_indices(mask: rs.Mask) -> None:
    """Triton computes the gradients, with a warning."""
    q, k, v = inputs(mask, *KINDS["bfloat16, shared heads, 128"])
    slopes = torch.linspace(0.01, 0.1, 8, device="cuda")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j).abs()

    dout = torch.randn_like(q)
    found = []
    for backend, warned in (("flex_flash", pytest.warns(UserWarning, match="through a score_mod")), ("eager", nullcontext())):
        out = rs.LocalWorld(3).attention(q, k, v, mask=mask, score_mod=score_mod, backend=backend)
        with warned:
            found.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for mine, theirs in zip(*found, strict=True):
        assert error(mine, theirs) <= 0.02 * theirs.abs().max().item()


def test_triton_computes_the_gradient_of_lse_with_a_warning() -> None:
    mask = MASKS["causal"]
    q, k, v = inputs(mask, *KINDS["float16, 64"])
    got = rs.LocalWorld(2).attention(q, k, v, mask=mask, backend="flex_flash", return_lse=True)
    with pytest.warns(UserWarning, match="Triton computes these gradients, since the FLASH back end takes no gradient of lse"):
        mine = torch.autograd.grad(got.lse.sum(), (q, k))
    want = dense_attention(q, k, v, torch.from_numpy(mask.dense()).cuda())
    for x, exact in zip(mine, torch.autograd.grad(want.lse.sum(), (q, k)), strict=True):
        assert error(x, exact) <= 0.01 * exact.abs().max().item()


def test_the_profiler_shows_flash_attention_and_no_triton() -> None:
    mask = MASKS["documents"]
    q, k, v = inputs(mask, *KINDS["float16, 64"])
    world = rs.LocalWorld(1)
    world.attention(q, k, v, mask=mask, backend="flex_flash").sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        world.attention(q, k, v, mask=mask, backend="flex_flash").sum().backward()
    names = [event.key for event in profile.key_averages()]
    assert any("flash_fwd" in name for name in names), names
    assert any("flash_bwd" in name for name in names), names
    assert not [name for name in names if "flex_attention" in name]
