"""The kernels for CUDA devices against dense float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ringspan as rs
from ringspan.kernels import Inputs, availability
from ringspan.kernels.flash_calls import make_flash_calls
from ringspan.kernels.reference import dense_attention
from tests.kernels.compare import MASKS, N, compared, error

pytestmark = pytest.mark.gpu

BACKENDS = ["fa4", "cudnn", "flash", "efficient"]
SHAPES = [
    (torch.bfloat16, 128, 128),
    (torch.float16, 64, 64),
    (torch.bfloat16, 64, 64),
    (torch.float16, 128, 128),
    (torch.bfloat16, 128, 64),
    (torch.float16, 64, 128),
    (torch.float32, 64, 64),
    (torch.float32, 40, 72),
]


def skip_if_unavailable(backend: str, dtype: torch.dtype, dim: int, v_dim: int | None = None) -> None:
    given = Inputs(device=torch.device("cuda"), dtype=dtype, head_dim=dim, v_dim=dim if v_dim is None else v_dim)
    reason = dict(availability(given))[backend]
    if reason:
        pytest.skip(f"{backend} {reason}")


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("dtype", "dim", "v_dim"), SHAPES, ids=[f"{str(t)[6:]}-{d}-{e}" for t, d, e in SHAPES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_error_is_at_most_twice_that_of_plain_attention(
    backend: str, dtype: torch.dtype, dim: int, v_dim: int, mask: rs.Mask
) -> None:
    skip_if_unavailable(backend, dtype, dim, v_dim)
    torch.manual_seed(0)
    sizes = ((8, dim), (2, dim), (2, v_dim))
    q, k, v = (torch.randn(2, h, N, d, device="cuda", dtype=dtype, requires_grad=True) for h, d in sizes)
    out, *grads = compared(q, k, v, mask, strategy="exchange", layout="zigzag", backend=backend)
    assert out.error <= 2 * out.yardstick
    for grad in grads:
        # In float32 the errors are so small that the order of summation and the kernel's exp matter.
        assert grad.error <= (4 if dtype == torch.float32 else 2) * grad.yardstick


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_lse(backend: str) -> None:
    skip_if_unavailable(backend, torch.bfloat16, 64)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, N, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weight = torch.randn(1, 4, N, device="cuda")
    want = torch.autograd.grad(
        (dense_attention(q, k, v, torch.from_numpy(MASKS["causal"].dense()).cuda()).lse * weight).sum(), (q, k)
    )
    lse = rs.LocalWorld(2).attention(q, k, v, mask=MASKS["causal"], backend=backend, return_lse=True).lse
    for a, b in zip(torch.autograd.grad((lse * weight).sum(), (q, k)), want, strict=True):
        assert error(a, b) <= 0.02 * b.double().square().mean().sqrt().item()


@pytest.mark.parametrize("backend", ["fa4", "flash"])
def test_a_large_gap_between_documents(backend: str) -> None:
    """The second of three ranks has the end of a document, 1,400 rows of another one, and the beginning of a third."""
    skip_if_unavailable(backend, torch.bfloat16, 64)
    mask = rs.documents([2300, 1400, 2300], causal=False)
    plan = rs.plan(mask, world=3, rank=1, strategy="exchange(stages=1)", layout="contiguous")
    calls = [make_flash_calls(task.bands, torch.device("cuda")) for step in plan.program.forward for task in step.tasks]
    assert [len(call.query_parts) for (call,) in calls] == [1, 2]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 6000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    for result in compared(q, k, v, mask, strategy="exchange(stages=1)", layout="contiguous", backend=backend):
        assert result.error <= 2 * result.yardstick


KERNEL_NAMES = {"fa4": "flash_attncute", "cudnn": "cudnn", "flash": "pytorch_flash", "efficient": "fmha_cutlass"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_profiler_shows_the_named_kernel(backend: str) -> None:
    skip_if_unavailable(backend, torch.bfloat16, 128)
    q, k, v = (torch.randn(1, 4, 512, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    world = rs.LocalWorld(2)
    world.attention(q, k, v, mask=rs.causal(512), backend=backend)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        world.attention(q, k, v, mask=rs.causal(512), backend=backend)
    names = " ".join(event.key for event in profile.key_averages())
    assert KERNEL_NAMES[backend] in names
    assert all(other not in names for name, other in KERNEL_NAMES.items() if name != backend)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fifty_deterministic_runs_are_bitwise_equal(backend: str, kv_heads: int) -> None:
    skip_if_unavailable(backend, torch.bfloat16, 128)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, N, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, kv_heads, kv_heads)
    )
    world = rs.LocalWorld(3)
    plans = world.plans(MASKS["documents"], strategy="exchange", layout="zigzag")
    grad = torch.randn(1, 8, N, 128, device="cuda", dtype=torch.bfloat16)

    def results() -> list[torch.Tensor]:
        out = world.run(plans, q, k, v, backend=backend).out
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    torch.use_deterministic_algorithms(True)
    try:
        first = results()
        for _ in range(49):
            assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_float64_has_no_fast_kernel() -> None:
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float64) for _ in range(3))
    with pytest.raises(rs.KernelError, match=r"fa4 computes in float16.*flash computes in.*cpu serves cpu"):
        rs.LocalWorld(2).attention(q, k, v, mask=rs.causal(64))
    out = rs.LocalWorld(2).attention(q, k, v, mask=rs.causal(64), backend="reference")
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
