"""FlashAttention-4 behind plain SDPA, on a device that has it, against dense float64.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import ringspan as rs
from ringspan.kernels import Inputs, availability
from ringspan.kernels.reference import dense_attention
from tests.kernels.compare import error, sdpa_math

pytestmark = pytest.mark.gpu

flash = torch.ops.aten._scaled_dot_product_flash_attention.default


@pytest.fixture(autouse=True)
def activated() -> Iterator[None]:
    reason = dict(availability(Inputs(device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=128, v_dim=128)))["fa4"]
    if reason:
        pytest.skip(f"FA4 {reason}")
    rs.activate("FA4")
    yield
    rs.restore()


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, **options)


def tensors(
    dtype: torch.dtype = torch.bfloat16,
    b: int = 2,
    s: int = 512,
    h: int = 4,
    d: int = 128,
    *,
    g: int | None = None,
    t: int | None = None,
) -> list[Tensor]:
    """q, k and v as a projection gives them: tokens before heads."""
    torch.manual_seed(0)
    shapes = ((s, h), (t or s, g or h), (t or s, g or h))
    return [torch.randn(b, n, heads, d, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for n, heads in shapes]


def visible(s: int, t: int, *, is_causal: bool, corner: str = "end") -> Tensor:
    return torch.from_numpy((rs.causal(s, t, align=corner) if is_causal else rs.full(s, t)).dense()).cuda()


def as_good_as_plain(out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible_ST: Tensor, scale: float | None = None) -> None:
    """Out and gradients are at most twice as far from float64 as a plain implementation in this dtype."""
    want = dense_attention(q, k, v, visible_ST, scale=scale).out
    plain = sdpa_math(q if scale is None else q * (scale * q.shape[-1] ** 0.5), k, v, visible_ST)
    dout = torch.randn_like(out)
    assert error(out, want) <= 2 * error(plain, want)
    grads, wanted, yardstick = (torch.autograd.grad(x, (q, k, v), dout.to(x.dtype)) for x in (out, want, plain))
    for mine, exact, theirs in zip(grads, wanted, yardstick, strict=True):
        assert error(mine, exact) <= 2 * error(theirs, exact)


def runs(call: Callable[[], object]) -> set[str]:
    """Which flash attentions run on the device, by the names of their kernels."""
    call()  # compile first
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"FA4" if "flash_attncute" in name else "another" for name in kernels if "flash" in name.lower()}


# -- accuracy ----------------------------------------------------------------------------------------------------------

GRID = list(product([torch.float16, torch.bfloat16], [1, 2], [512, 1024], [4, 8], [64, 128], [False, True]))


@pytest.mark.parametrize(("dtype", "b", "s", "h", "d", "is_causal"), GRID)
def test_eager(dtype: torch.dtype, b: int, s: int, h: int, d: int, is_causal: bool) -> None:
    q, k, v = tensors(dtype, b, s, h, d)
    as_good_as_plain(sdpa(q, k, v, is_causal=is_causal), q, k, v, visible(s, s, is_causal=is_causal))


@pytest.mark.parametrize(
    ("dtype", "b", "s", "h", "d", "is_causal"),
    [(torch.bfloat16, 2, 1024, 8, 128, True), (torch.float16, 1, 512, 4, 64, False), (torch.bfloat16, 1, 1024, 4, 64, True)],
)
def test_compiled(dtype: torch.dtype, b: int, s: int, h: int, d: int, is_causal: bool) -> None:
    torch._dynamo.reset()
    q, k, v = tensors(dtype, b, s, h, d)
    attend = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal), fullgraph=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = attend(q, k, v)
        as_good_as_plain(out, q, k, v, visible(s, s, is_causal=is_causal))
        assert runs(lambda: attend(q, k, v).sum().backward()) == {"FA4"}


@pytest.mark.parametrize("is_causal", [False, True])
def test_shared_key_heads(is_causal: bool) -> None:
    q, k, v = tensors(h=8, g=2)
    out = sdpa(q, k, v, is_causal=is_causal, enable_gqa=True)
    as_good_as_plain(out, q, k, v, visible(512, 512, is_causal=is_causal))


def test_a_given_scale() -> None:
    q, k, v = tensors()
    as_good_as_plain(sdpa(q, k, v, scale=0.2), q, k, v, visible(512, 512, is_causal=False), scale=0.2)


def test_a_head_dim_that_sdpa_pads() -> None:
    q, k, v = tensors(d=60)
    as_good_as_plain(sdpa(q, k, v, is_causal=True), q, k, v, visible(512, 512, is_causal=True))


def test_odd_lengths() -> None:
    q, k, v = tensors(s=777, t=301)
    as_good_as_plain(sdpa(q, k, v), q, k, v, visible(777, 301, is_causal=False))


def test_causal_lower_right() -> None:
    q, k, v = tensors(s=301, t=777)
    out = sdpa(q, k, v, attn_mask=causal_lower_right(301, 777))
    as_good_as_plain(out, q, k, v, visible(301, 777, is_causal=True))


def test_queries_without_keys() -> None:
    """More queries than keys: SDPA never calls the operator so, but the operator supports it."""
    q, k, v = tensors(s=777, t=301)
    out, lse, *_ = flash(q, k, v, 0.0, True)
    assert torch.equal(lse == -torch.inf, torch.arange(777, device="cuda").expand_as(lse) < 777 - 301)
    as_good_as_plain(out, q, k, v, visible(777, 301, is_causal=True))


def test_is_causal_of_a_rectangle_still_means_the_upper_left() -> None:
    """SDPA then uses another backend."""
    q, k, v = tensors(s=301, t=777)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    as_good_as_plain(out, q, k, v, visible(301, 777, is_causal=True, corner="start"))


# -- which kernels run -------------------------------------------------------------------------------------------------


def test_flash_attention_4_runs_and_no_other_until_restore() -> None:
    q, k, v = tensors()
    assert runs(lambda: sdpa(q, k, v, is_causal=True).sum().backward()) == {"FA4"}
    rs.restore()
    assert runs(lambda: sdpa(q, k, v, is_causal=True).sum().backward()) == {"another"}


def test_compiled_code_follows_activate_and_restore() -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in tensors())
    attend = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), fullgraph=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert runs(lambda: attend(q, k, v)) == {"FA4"}
        rs.restore()
        assert runs(lambda: attend(q, k, v)) == {"another"}
        rs.activate("FA4")
        assert runs(lambda: attend(q, k, v)) == {"FA4"}


def test_the_backward_pass_may_run_another_implementation_than_the_forward() -> None:
    q, k, v = tensors()
    visible_ST = visible(512, 512, is_causal=True)
    out = sdpa(q, k, v, is_causal=True)
    rs.restore()
    as_good_as_plain(out, q, k, v, visible_ST)
    out = sdpa(q, k, v, is_causal=True)
    rs.activate("FA4")
    as_good_as_plain(out, q, k, v, visible_ST)


def test_the_kernels_of_a_plan_are_not_replaced() -> None:
    q, k, v = tensors()
    assert runs(lambda: rs.LocalWorld(2).attention(q, k, v, mask=rs.causal(512), backend="flash")) == {"another"}


# -- strides and determinism -------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "as usual": lambda: torch.randn(2, 4, 512, 128, device="cuda", dtype=torch.bfloat16),
    "tokens before heads": lambda: torch.randn(2, 512, 4, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2),
    "tokens first": lambda: torch.randn(512, 2, 4, 128, device="cuda", dtype=torch.bfloat16).permute(1, 2, 0, 3),
    "one of three": lambda: torch.randn(2, 512, 3, 4, 128, device="cuda", dtype=torch.bfloat16)[:, :, 1].transpose(1, 2),
    "not from the start": lambda: torch.randn(2 * 4 * 512 * 128 + 3, device="cuda", dtype=torch.bfloat16)[3:].view(
        2, 4, 512, 128
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_output_has_the_strides_of_the_query(layout: Callable[[], Tensor]) -> None:
    q, k, v = (layout().requires_grad_() for _ in range(3))
    out = sdpa(q, k, v, is_causal=True)
    assert out.stride() == torch.empty_like(q).stride()
    as_good_as_plain(out, q, k, v, visible(512, 512, is_causal=True))
    told = flash(*(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (q, k, v)))
    assert out.stride() == told[0].stride()


def test_deterministic_gradients_are_bitwise_equal() -> None:
    q, k, v = tensors(s=2048, h=8, g=2)
    dout = torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(sdpa(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), dout) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


# -- refused inputs ----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "dropout": (lambda q, k, v: sdpa(q, k, v, dropout_p=0.1), "FA4 has no dropout, and dropout_p is 0.1"),
    "dtype": (
        lambda q, k, v: flash(q.float(), k.float(), v.float()),
        "FA4 computes in float16 and bfloat16, not torch.float32",
    ),
    "head dim": (lambda q, k, v: flash(q[..., :60], k[..., :60], v[..., :60]), "FA4 takes a head dim that is a multiple of 8"),
    "3 dims": (lambda q, k, v: flash(q[0], k[0], v[0]), "FA4 takes q, k and v of 4 dims"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_inputs_are_refused(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(rs.KernelError) as error:
        call(*tensors())
    assert message in str(error.value)


def test_an_older_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(rs.KernelError, match=r"FA4 needs compute capability 9, 10 or 11 .*; this device has 8\.0"):
        flash(q, k, v)
