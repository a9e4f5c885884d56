"""The Triton kernels of sinks against plain operations in float64, in Triton's interpreter if there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.testing.assertions import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
fused_sinks = pytest.importorskip("ringspan.kernels.fused_sinks", reason="needs triton")
S, B, H = 7, 2, 3


def inputs(e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return out (S, B, H, E) and lse (S, B, H) with a kernel's strides, and sinks. Row 1 sees no key."""
    torch.manual_seed(e)
    out = torch.randn(B, S, H, e, device=DEVICE).to(dtype).transpose(0, 1)
    lse = 3 * torch.randn(B, H, S, device=DEVICE).permute(2, 0, 1)
    out[1], lse[1] = 0, -torch.inf
    return out.requires_grad_(), lse.requires_grad_(), torch.tensor([0.5, -4.0, 6.0], device=DEVICE, requires_grad=True)


def plain(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(lse - sink)
    return out * share.unsqueeze(-1), torch.logaddexp(lse, sink.expand_as(lse))


@pytest.mark.parametrize("uses", ["out", "lse", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("e", [5, 64])
def test_results_and_gradients_equal_plain_ones(e: int, dtype: torch.dtype, uses: str) -> None:
    given = inputs(e, dtype)
    wide = [x.detach().double().requires_grad_() for x in given]
    found, want = fused_sinks.AddSinks.apply(*given), plain(*wide)
    weight = torch.linspace(-1, 1, e, device=DEVICE)
    grads = []
    for (out, lse), leaves in ((found, given), (want, wide)):
        loss = (out * weight.to(out.dtype)).sum(-1).double().square().sum() if uses != "lse" else 0.0
        loss = loss + (lse.double().sin().sum() if uses != "out" else 0.0)
        grads.append(torch.autograd.grad(loss, leaves, materialize_grads=True))
    bound = 2e-5 if dtype == torch.float32 else 5e-3
    for x, y in zip((*found, *grads[0]), (*want, *grads[1]), strict=True):
        assert_close(x.double(), y, rtol=bound, atol=bound * y.abs().max().item())


@pytest.mark.parametrize("power", [1, 2], ids=["linear loss", "quadratic loss"])
def test_gradients_can_be_differentiated(power: int) -> None:
    """A loss that is linear in the results has gradients that do not depend on a gradient."""
    given = inputs(5, torch.float32)
    # torch.logaddexp has NaN as the second derivative at -inf.
    wide = [x.detach().double().nan_to_num(neginf=-100.0).requires_grad_() for x in given]
    found = []
    for function, leaves in ((fused_sinks.AddSinks.apply, given), (plain, wide)):
        out, lse = function(*leaves)
        grads = torch.autograd.grad((out**power).sum() + (lse**power).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in grads), leaves))
    for x, y in zip(*found, strict=True):
        assert_close(x.double(), y, rtol=1e-4, atol=1e-4 * y.abs().max().item())


def test_a_row_without_keys_and_without_a_sink_is_empty() -> None:
    out, lse = torch.zeros(1, 1, 1, 8, device=DEVICE), torch.full((1, 1, 1), -torch.inf, device=DEVICE)
    new_out, new_lse = fused_sinks.AddSinks.apply(out, lse, torch.full((1,), -torch.inf, device=DEVICE))
    assert (new_out == 0).all()
    assert new_lse.item() == -torch.inf


@pytest.mark.gpu
def test_with_sinks_uses_them() -> None:
    out = torch.randn(2, H, 33, 64, device="cuda", dtype=torch.bfloat16)
    lse, sink = torch.randn(2, H, 33, device="cuda"), torch.randn(H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = rs.with_sinks(out, lse, sink)
    assert found.out.grad_fn.next_functions[0][0].name() == "AddSinksBackward"  # type: ignore[union-attr]
    want = plain(out.double().movedim(2, 0), lse.double().movedim(2, 0), sink.double())
    assert_close(found.out.double(), want[0].movedim(0, 2), rtol=5e-3, atol=1e-6)
    assert_close(found.lse.double(), want[1].movedim(0, 2), rtol=1e-5, atol=1e-6)
    found.out.float().sum().backward()
    (dsink,) = torch.autograd.grad(want[0].sum(), sink)
    assert_close(sink.grad.double(), dsink.double(), rtol=2e-2, atol=2e-2 * dsink.abs().max().item())  # type: ignore[union-attr]
