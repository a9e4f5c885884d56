"""activate and restore, and the operators behind them, on the CPU, with a dense implementation of FlashAttention-4.

On the CPU, SDPA calls another operator. The flash operator that SDPA calls on CUDA has no CPU kernel, so here it runs
what was activated, or raises.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.frontends.sdpa import IMPLEMENTATIONS
from ringspan.kernels import Inputs, fa4, reference

flash = torch.ops.aten._scaled_dot_product_flash_attention.default


class Interface(types.ModuleType):
    """A dense ``flash_attn.cute.interface`` with the arguments and the number of results of the real one."""

    def __init__(self, *, extra: int = 3) -> None:
        super().__init__("flash_attn.cute.interface")
        self.extra = extra
        self.calls: list[tuple[str, bool]] = []

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, out: Any, causal: bool = False, **_: Any
    ) -> Any:
        self.calls.append(("forward", torch.are_deterministic_algorithms_enabled()))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        got = reference.dense_attention(q, k, v, self._visible(q, k, causal), scale=softmax_scale)
        out.copy_(got.out.transpose(1, 2))
        return out, got.lse.float(), *([None] * self.extra)

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, causal: bool = False, **given: Any
    ) -> Any:
        self.calls.append(("backward", given["deterministic"]))
        scale, g = given["softmax_scale"], k.shape[2]
        q, k, v, out, dout = (x.double().transpose(1, 2) for x in (q, k, v, out, dout))
        visible, (k, v) = self._visible(q, k, causal), (x.repeat_interleave(q.shape[1] // g, dim=1) for x in (k, v))
        weight = (q @ k.mT * scale - lse.unsqueeze(-1)).exp() * visible
        dscore = weight * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
        dk, dv = (x.unflatten(1, (g, -1)).sum(2) for x in (dscore.mT @ q, weight.mT @ dout))
        into = [given[name] for name in ("dq", "dk", "dv")]
        for grad, x in zip(into, (dscore @ k, dk, dv), strict=True):
            grad.copy_(x.transpose(1, 2))
        return *into, *([None] * self.extra)

    @staticmethod
    def _visible(q_BHSD: Tensor, k_BGTD: Tensor, causal: bool) -> Tensor:
        lengths = (q_BHSD.shape[2], k_BGTD.shape[2])
        return torch.from_numpy((rs.causal(*lengths, align="end") if causal else rs.full(*lengths)).dense())


def install(monkeypatch: pytest.MonkeyPatch, interface: Interface | None) -> None:
    """Make ``flash_attn.cute`` importable with this interface; with None, not importable, whatever is installed."""
    if interface is None:
        for name in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, None)
    else:
        package, cute = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
        cute.__spec__ = ModuleSpec("flash_attn.cute", None)
        package.cute, cute.interface = cute, interface  # type: ignore[attr-defined]
        for module in (package, cute, interface):
            monkeypatch.setitem(sys.modules, module.__name__, module)
    fa4.load.cache_clear()
    fa4.is_installed.cache_clear()


@pytest.fixture(autouse=True)
def restored() -> Any:
    yield
    rs.restore()
    fa4.load.cache_clear()
    fa4.is_installed.cache_clear()


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Interface:
    """The package that ``activate("FA4")`` finds, for CPU tensors."""
    interface = Interface()
    install(monkeypatch, interface)
    monkeypatch.setattr(fa4, "DISPATCH_KEY", "CPU")
    monkeypatch.setattr(fa4, "unsupported_reason", lambda inputs: None)
    return interface


def tensors(h: int = 4, g: int = 4, s: int = 9, t: int = 9, d: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, n, d, requires_grad=True) for heads, n in ((h, s), (g, t), (g, t))]


def serves() -> bool:
    """Whether the operator has a kernel for CPU tensors."""
    try:
        flash(*tensors())
    except NotImplementedError:
        return False
    return True


# -- activate and restore ----------------------------------------------------------------------------------------------


def test_from_activate_to_restore(interface: Interface) -> None:
    assert (rs.current(), rs.available(), serves()) == (None, ["FA4"], False)
    rs.activate("FA4")
    assert (rs.current(), serves()) == ("FA4", True)
    rs.activate("FA4")
    assert (rs.current(), serves()) == ("FA4", True)
    rs.restore()
    assert (rs.current(), serves()) == (None, False)
    rs.restore()
    assert (rs.current(), serves()) == (None, False)
    rs.activate("FA4")
    assert (rs.current(), serves()) == ("FA4", True)


def test_the_functions_are_in_rs_sdpa_and_in_rs() -> None:
    for name in ("activate", "available", "current", "restore"):
        assert getattr(rs.sdpa, name) is getattr(rs, name)


def test_activating_another_replaces_the_active_one(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "twin", "ringspan.kernels.fa4")
    assert rs.available() == ["FA4", "twin"]
    rs.activate("FA4")
    rs.activate("twin")
    assert rs.current() == "twin"
    with pytest.raises(rs.KernelError, match=r"^twin has no dropout"):
        flash(*tensors(), 0.5)
    rs.restore()
    assert (rs.current(), serves()) == (None, False)


def test_activating_does_not_warn(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "twin", "ringspan.kernels.fa4")
    torch.set_warn_always(True)  # not only once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in ("FA4", "twin", "FA4"):
                rs.activate(name)
    finally:
        torch.set_warn_always(False)


def test_an_unknown_one_leaves_the_active_one_active(interface: Interface) -> None:
    rs.activate("FA4")
    with pytest.raises(
        rs.UnknownKernel, match=r"no flash attention is called 'FA5' \(did you mean FA4\?\); there is FA4"
    ) as error:
        rs.activate("FA5")
    assert isinstance(error.value, ValueError)
    assert (rs.current(), serves()) == ("FA4", True)


def test_a_missing_one_leaves_the_active_one_active(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    rs.activate("FA4")
    gone = types.ModuleType("gone")
    gone.load = lambda: __import__("there_is_no_such_module")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gone", gone)
    monkeypatch.setitem(IMPLEMENTATIONS, "gone", "gone")
    with pytest.raises(ModuleNotFoundError):
        rs.activate("gone")
    assert (rs.current(), serves()) == ("FA4", True)


def test_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    assert rs.available() == []
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn.*pip install flash-attn-4") as error:
        rs.activate("FA4")
    assert error.value.name == "flash_attn.cute"
    assert rs.current() is None


def test_the_error_names_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text('raise ImportError("libcuda.so.1: cannot open")')
    install(monkeypatch, None)
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"flash-attn-4\) is installed, but cannot be imported: libcuda.so.1"):
        rs.activate("FA4")
    assert rs.current() is None


def test_a_package_installed_meanwhile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(ModuleNotFoundError):
        rs.activate("FA4")
    install(monkeypatch, Interface())
    rs.activate("FA4")
    assert (rs.current(), rs.available()) == ("FA4", ["FA4"])


# -- results of the operators ------------------------------------------------------------------------------------------

CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "shared key heads": {"h": 6, "g": 2, "is_causal": True},
    "a rectangle": {"s": 5, "t": 11},
    "a causal rectangle, aligned at the bottom right": {"s": 5, "t": 11, "is_causal": True},
    "one query": {"s": 1, "t": 11, "is_causal": True},
}


def truth(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """PyTorch's, in float64, with the mask written out."""
    s, t = q.shape[2], k.shape[2]
    visible = torch.ones(s, t, dtype=torch.bool).tril(t - s if is_causal else t)
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=visible, scale=scale, enable_gqa=True)


def eager(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return attend


def compiled(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(attend, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("how", [eager, compiled])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_out_and_gradients(case: dict[str, Any], how: Callable[..., Any], interface: Interface) -> None:
    q, k, v = tensors(**{name: n for name, n in case.items() if name in "hgst"})
    options = {name: x for name, x in case.items() if name not in "hgst"}
    is_causal, scale = options.get("is_causal", False), options.get("scale")
    rs.activate("FA4")
    out = how(lambda q, k, v: flash(q, k, v, 0.0, is_causal, scale=scale)[0])(q, k, v)
    want = truth(q, k, v, **options)
    torch.testing.assert_close(out, want.float())
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    torch.testing.assert_close(grads, torch.autograd.grad(want, (q, k, v), dout.double()))
    assert interface.calls == [("forward", False), ("backward", False)]


@pytest.mark.parametrize("extra", [0, 3, 5])
def test_the_number_of_results_does_not_matter(extra: int, interface: Interface) -> None:
    interface.extra = extra
    rs.activate("FA4")
    q, k, v = tensors()
    out = flash(q, k, v)[0]
    torch.testing.assert_close(out, truth(q, k, v).float())
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(truth(q, k, v).sum(), (q, k, v)))


def test_compiled_code_follows(interface: Interface) -> None:
    rs.activate("FA4")
    q, k, v = (x.detach() for x in tensors())
    attend = compiled(lambda q, k, v: flash(q, k, v)[0])
    attend(q, k, v)
    rs.restore()
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
        attend(q, k, v)
    rs.activate("FA4")
    torch.testing.assert_close(attend(q, k, v), truth(q, k, v).float())


def test_the_deterministic_flag_is_passed_on(interface: Interface) -> None:
    rs.activate("FA4")
    q, k, v = tensors()
    torch.use_deterministic_algorithms(True)
    try:
        flash(q, k, v)[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert interface.calls == [("forward", True), ("backward", True)]


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "as usual": lambda: torch.randn(2, 4, 9, 8),
    "tokens before heads": lambda: torch.randn(2, 9, 4, 8).transpose(1, 2),
    "tokens first": lambda: torch.randn(9, 2, 4, 8).permute(1, 2, 0, 3),
    "one of three": lambda: torch.randn(2, 9, 3, 4, 8)[:, :, 1].transpose(1, 2),
    "every other token": lambda: torch.randn(2, 4, 18, 8)[:, :, ::2],
    "one head for all": lambda: torch.randn(2, 1, 9, 8).expand(2, 4, 9, 8),
    "not from the start": lambda: torch.randn(2 * 4 * 9 * 8 + 3)[3:].view(2, 4, 9, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_results_have_the_strides_of_the_meta_functions(layout: Callable[[], Tensor], interface: Interface) -> None:
    rs.activate("FA4")
    q, k, v = (layout() for _ in range(3))
    got = flash(q, k, v)
    told = flash(*(torch.empty_strided(x.shape, x.stride(), device="meta") for x in (q, k, v)))
    assert len(got) == len(told) == 9
    for mine, theirs in zip(got, told, strict=True):
        if isinstance(mine, Tensor):
            assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        else:
            assert mine == theirs
    out, lse, *_ = got
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    seed = torch.empty(2, dtype=torch.uint64)
    grads = backward(torch.randn_like(out), q, k, v, out, lse, None, None, 9, 9, 0.0, False, seed, seed)
    assert [x.stride() for x in grads] == [torch.empty_like(x).stride() for x in (q, k, v)]


def test_a_query_in_the_order_of_a_projection_gives_an_output_in_that_order(interface: Interface) -> None:
    rs.activate("FA4")
    q, k, v = (LAYOUTS["tokens before heads"]() for _ in range(3))
    out = flash(q, k, v)[0]
    assert out.stride() == q.stride()
    assert out.transpose(1, 2).is_contiguous()


# -- refused inputs ----------------------------------------------------------------------------------------------------


def strided_head_dim(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "dropout": (lambda q, k, v: flash(q, k, v, 0.1), "has no dropout, and dropout_p is 0.1"),
    "debug mask": (lambda q, k, v: flash(q, k, v, 0.0, False, True), "gives no debug mask"),
    "3 dims": (
        lambda q, k, v: flash(q[0], k[0], v[0]),
        "takes q, k and v of 4 dims (batch, heads, tokens, dim), not of 3, 3 and 3",
    ),
    "two dtypes": (lambda q, k, v: flash(q, k.half(), v), "of one dtype, not torch.float32, torch.float16 and torch.float32"),
    "a value dim": (lambda q, k, v: flash(q, k, v[..., :4]), "k and v (B, G, T, D) with H a multiple of G, not (2, 4, 9, 8)"),
    "heads": (lambda q, k, v: flash(q, k[:, :3], v[:, :3]), "H a multiple of G, not (2, 4, 9, 8), (2, 3, 9, 8)"),
    "batches": (lambda q, k, v: flash(q, k[:1], v[:1]), "not (2, 4, 9, 8), (1, 4, 9, 8), (1, 4, 9, 8)"),
    "strides": (lambda q, k, v: flash(q, strided_head_dim(k), v), "with a contiguous last dim, not strides"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_inputs_are_refused(call: Callable[..., Any], message: str, interface: Interface) -> None:
    rs.activate("FA4")
    with pytest.raises(rs.KernelError) as error:
        call(*tensors())
    assert str(error.value).startswith("FA4 ")
    assert message in str(error.value)
    assert interface.calls == []


def test_a_backward_of_dropout_is_refused(interface: Interface) -> None:
    """Whatever was active in the forward pass."""
    rs.activate("FA4")
    q, k, v = tensors()
    out, lse, *_, seed, offset, _ = flash(q, k, v)
    with pytest.raises(rs.KernelError, match="FA4 has no dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, lse, None, None, 9, 9, 0.1, False, seed, offset
        )


def test_the_reason_of_the_kernel_is_in_the_error(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fa4, "unsupported_reason", lambda inputs: asked.append(inputs) or "is out of order")
    rs.activate("FA4")
    with pytest.raises(rs.KernelError, match=r"^FA4 is out of order\. rs.restore\(\) brings back"):
        flash(*tensors())
    assert asked == [Inputs(device=torch.device("cpu"), dtype=torch.float32, head_dim=8, v_dim=8)]


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "reason"),
    [
        ((9, 0), torch.bfloat16, 128, None),
        ((9, 0), torch.float16, 256, None),
        ((10, 0), torch.bfloat16, 64, None),
        ((10, 0), torch.bfloat16, 256, "takes a head dim that is a multiple of 8 up to 128 on this device, not 256"),
        ((9, 0), torch.bfloat16, 60, "takes a head dim that is a multiple of 8 up to 256 on this device, not 60"),
        ((9, 0), torch.float32, 64, "computes in float16 and bfloat16, not torch.float32"),
        ((8, 0), torch.bfloat16, 64, "needs compute capability 9, 10 or 11 (Hopper, Blackwell); this device has 8.0"),
        ((12, 0), torch.bfloat16, 64, "needs compute capability 9, 10 or 11 (Hopper, Blackwell); this device has 12.0"),
    ],
)
def test_inputs_that_flash_attention_4_supports(
    capability: tuple[int, int], dtype: torch.dtype, dim: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Interface())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fa4.unsupported_reason(Inputs(device=torch.device("cuda"), dtype=dtype, head_dim=dim, v_dim=dim)) == reason
