"""On GPUs the gradients that arrive in a step are added in one pass. The bits are those of adding one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.engine import slots
from tests.kernels.test_gpu import skip_if_unavailable

pytestmark = pytest.mark.gpu

N = 1024
MASKS = {
    "causal": rs.causal(N),
    "window": rs.causal(N) & rs.window(left=300),
    "documents": rs.documents([300, 11, 500, 213]),
}
STRATEGIES = ["exchange(stages=1)", "exchange(stages=2)", "ring", "gather(stages=1)", "pass_q", "hierarchical(per_node=2)"]


def gradients(mask: rs.Mask, strategy: str, layout: str, dkv_dtype: str, dtype: torch.dtype, backend: str) -> list[Tensor]:
    """Return the gradients of three calls: one that is executed, one that is recorded, one that is replayed."""
    rs.clear_caches()
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((8, N, 64), (2, N, 64), (2, N, 64))
    qkv = [torch.randn(1, *x, device="cuda", generator=generator).to(dtype).requires_grad_() for x in sizes]
    world = rs.LocalWorld(4)
    plans = world.plans(mask, strategy=strategy, layout=layout, dkv_dtype=dkv_dtype)  # type: ignore[arg-type]
    dout = torch.randn(1, 8, N, 64, device="cuda", generator=generator).to(dtype)
    return [x for _ in range(3) for x in torch.autograd.grad(world.run(plans, *qkv, backend=backend).out, qkv, dout)]


@pytest.mark.parametrize(
    ("backend", "dtype", "dkv_dtype"),
    [
        ("fa4", torch.bfloat16, "float32"),
        ("fa4", torch.bfloat16, "bfloat16"),
        ("flash", torch.float16, "float32"),
        ("reference", torch.float32, "float32"),
        ("reference", torch.float64, "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["zigzag", "round_robin"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
def test_the_bits_are_those_of_single_additions(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    strategy: str,
    layout: str,
    backend: str,
    dtype: torch.dtype,
    dkv_dtype: str,
) -> None:
    if backend != "reference":
        skip_if_unavailable(backend, dtype, 64)
        torch.use_deterministic_algorithms(True)  # the kernel, which adds to dq in any order otherwise
    try:
        together = gradients(MASKS[name], strategy, layout, dkv_dtype, dtype, backend)
        monkeypatch.setattr(slots, "ADDED_TOGETHER", set())
        one_by_one = gradients(MASKS[name], strategy, layout, dkv_dtype, dtype, backend)
    finally:
        torch.use_deterministic_algorithms(False)
    for x, y in zip(together, one_by_one, strict=True):
        assert x.isfinite().all()
        assert torch.equal(x, y)
