"""The flex kernel on a CPU: the program is traced by Dynamo and run by PyTorch's dense definition of FlexAttention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringspan as rs
from ringspan.frontends.attention_block import AttentionCatcher
from ringspan.kernels import IndexedMods, Inputs, Kernel, eager, flex, mods_of, reference
from ringspan.kernels.accumulators import OutputAccumulator
from ringspan.kernels.kernel import Saved
from ringspan.kernels.partial import Partial

pytestmark = pytest.mark.usefixtures("dense_flex_attention")

N = 150
MASKS = {
    "causal": rs.causal(N),
    "more keys than queries": rs.causal(N, 2 * N, align="end"),
    "window": rs.causal(N) & rs.window(left=20),
    "documents": rs.documents([30, 1, 70, 49]),
    "prefix": rs.prefix(N, 40),
    "blind rows": rs.full(N) - rs.Mask.from_bands([(20, 140, 0, N, -N, N)], N),
    "two layers": ~(rs.causal(N) & rs.window(left=20)),
    "nothing": rs.full(N) - rs.full(N),
}


def inputs(mask: rs.Mask, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with the strides that the engine uses: rows first in memory, keys and values side by side."""
    torch.manual_seed(0)
    rows, cols = mask.lengths
    q = torch.randn(rows, 2, 4, 16, dtype=dtype).movedim(0, 2)
    return q, *torch.randn(cols, 2, 2, 16 + 24, dtype=dtype).movedim(0, 2).split([16, 24], dim=-1)


def forward(mask: rs.Mask, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    result = OutputAccumulator((q.shape[2], *q.shape[:2], v.shape[-1]), like=q)
    for start, stop, (out, lse) in flex.attend(q, k, v, mask.bands, scale=0.3):
        result.add(start, stop, out.movedim(2, 0), lse.movedim(2, 0))
    return Partial(*(x.movedim(0, 2) for x in result.finish()))


def backward(kernel: Kernel, mask: rs.Mask, saved: Saved, k: Tensor, v: Tensor) -> list[Tensor]:
    dq, dk, dv = (torch.zeros_like(x) for x in (saved.q_BHSD, k, v))
    for part in kernel.attend_backward(saved, k, v, mask.bands, scale=0.3):
        dq[:, :, part.rows] += part.dq_BHSD
        dk[:, :, part.keys] += part.dk_BGTD
        dv[:, :, part.keys] += part.dv_BGTE
    return [dq, dk, dv]


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_against_the_reference(mask: rs.Mask, with_dlse: bool) -> None:
    q, k, v = inputs(mask)
    (want,) = reference.attend(q, k, v, mask.bands, scale=0.3)
    got = forward(mask, q, k, v)
    torch.testing.assert_close(got, want.partial)
    dlse = torch.randn_like(got.lse).masked_fill(got.lse == -torch.inf, 0.0) if with_dlse else None
    saved = Saved(q, torch.randn_like(got.out), got.out, got.lse, dlse)
    torch.testing.assert_close(backward(flex, mask, saved, k, v), backward(reference, mask, saved, k, v))


def test_gradients_through_some_of_the_bands() -> None:
    """Out and lse are those of the whole mask, the gradients those through some of its bands."""
    whole, some = MASKS["causal"], MASKS["window"]
    q, k, v = inputs(whole)
    saved = Saved(q, torch.randn(2, 4, N, 24, dtype=q.dtype), *forward(whole, q, k, v))
    torch.testing.assert_close(backward(flex, some, saved, k, v), backward(reference, some, saved, k, v))


def compiled_programs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def test_other_masks_and_lengths_need_no_recompilation() -> None:
    """This includes masks with two equal lengths, of one block, or without the first rows or keys."""
    first, *others = [rs.Mask.from_bands([(q, 500, k, 500, -500, 500)], 500) for q, k in ((99, 77), (0, 99), (99, 0), (0, 0))]
    others += [rs.full(n, m) for n, m in ((2, 3), (128, 128), (128, 500), (500, 128), (700, 700))]
    others += [rs.documents([n, 600 - n]) for n in range(10, 300, 30)]
    torch._dynamo.reset()  # drop the programs of other tests
    forward(first, *inputs(first))
    before = compiled_programs()
    for mask in others:
        forward(mask, *inputs(mask))
    assert compiled_programs() == before


class FailingCatcher(AttentionCatcher):
    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pytest.fail("caught")


def test_backward_inside_a_context_that_intercepts_attention() -> None:
    mask = MASKS["causal"]
    q, k, v = inputs(mask)
    saved = Saved(q, torch.randn(2, 4, N, 24, dtype=q.dtype), *forward(mask, q, k, v))
    with FailingCatcher():
        got = backward(flex, mask, saved, k, v)
    torch.testing.assert_close(got, backward(reference, mask, saved, k, v))


def test_calls_cached_in_inference_mode_can_be_used_in_training() -> None:
    flex.make_flex_calls.cache_clear()  # type: ignore[attr-defined]
    with torch.inference_mode():
        (call,) = flex.make_flex_calls(MASKS["causal"].bands, False, "TRITON", torch.device("cpu"))
    assert not any(x.is_inference() for x in (call.start_S, call.stop_S, *call.lists.values()))


@pytest.mark.parametrize(
    ("changes", "capability", "reason"),
    [
        ({}, (8, 0), None),
        ({"dtype": torch.float32, "head_dim": 16, "v_dim": 256}, (9, 0), None),
        ({"device": torch.device("cpu")}, (9, 0), "serves CUDA devices, not cpu"),
        ({}, (7, 5), "needs compute capability 8 or higher; this device has 7.5"),
        ({"dtype": torch.float64}, (9, 0), "computes in float16, bfloat16 and float32, not torch.float64"),
        ({"head_dim": 8}, (9, 0), "takes a head dim from 16 to 256, not 8"),
        ({"v_dim": 512}, (9, 0), "takes a value dim from 16 to 256, not 512"),
    ],
)
def test_unsupported_reason(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], capability: tuple[int, int], reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    plain = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "v_dim": 64}
    assert flex.unsupported_reason(Inputs(**{**plain, **changes})) == reason  # type: ignore[arg-type]


# -- score_mod and mask_mod --------------------------------------------------------------------------------------------


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope_H = nn.Parameter(torch.linspace(0.1, 1, 9, dtype=torch.float64))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - self.slope_H[h] * (q - k).abs() / 50


def indexed(score_mod: Any, mask_mod: Any, mask: rs.Mask) -> IndexedMods:
    rows, cols = mask.lengths
    source = torch.Generator().manual_seed(3)
    q_tokens, k_tokens = torch.randperm(400, generator=source)[:rows], torch.randperm(400, generator=source)[:cols]
    mods = mods_of(score_mod, mask_mod, torch.zeros(1, dtype=torch.float64))
    assert mods is not None
    return IndexedMods(mods=mods, q_tokens_S=q_tokens, k_tokens_T=k_tokens, first_head=3)


IDS = torch.arange(800).remainder(7).view(2, 400)
BIAS = torch.randn(9, 400, dtype=torch.float64, requires_grad=True)
FUNCTIONS = {
    "documents": (None, lambda b, h, q, k: IDS[b, q] != IDS[b, k]),
    "of heads": (lambda score, b, h, q, k: score + 0.01 * h * (q - k), None),
    "learned": (rs.relative_bias(BIAS[:, :21].detach().requires_grad_()), lambda b, h, q, k: (q + k + h) % 3 > 0),
    "in a module": (Slopes(), None),
}


@pytest.mark.parametrize("name", ["causal", "documents", "blind rows", "two layers"])
@pytest.mark.parametrize(("score_mod", "mask_mod"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_score_mod_and_mask_mod_equal_the_eager_kernel(score_mod: Any, mask_mod: Any, name: str) -> None:
    """The eager kernel is compared with the definition in its own tests."""
    mask = MASKS[name]
    q, k, v = inputs(mask)
    mods = indexed(score_mod, mask_mod, mask)
    results, grads = [], []
    for kernel in (flex, eager):
        total = OutputAccumulator((q.shape[2], *q.shape[:2], v.shape[-1]), like=q)
        with torch.no_grad():
            for start, stop, (out, lse) in kernel.attend(q, k, v, mask.bands, scale=0.3, mods=mods):
                total.add(start, stop, out.movedim(2, 0), lse.movedim(2, 0))
        results.append(Partial(*(x.movedim(0, 2) for x in total.finish())))
    torch.testing.assert_close(*results)
    saved = Saved(q, torch.randn(results[1].out.shape, dtype=q.dtype), *results[1])
    for kernel in (flex, eager):
        sums = [torch.zeros_like(x) for x in (q, k, v, *mods.mods.learned)]
        for rows, dq, keys, dk, dv, dlearned in kernel.attend_backward(saved, k, v, mask.bands, scale=0.3, mods=mods):
            into = (sums[0][:, :, rows], sums[1][:, :, keys], sums[2][:, :, keys], *sums[3:])
            for total_of, grad in zip(into, (dq, dk, dv, *dlearned), strict=True):
                total_of.add_(grad)
        grads.append(sums)
    torch.testing.assert_close(*grads)


def test_another_closure_of_the_same_code_needs_no_recompilation() -> None:
    mask = MASKS["causal"]
    tensors = inputs(mask)

    def once(ids: Tensor) -> None:
        mods = indexed(None, lambda b, h, q, k: ids[q] == ids[k], mask)
        for _ in flex.attend(*tensors, mask.bands, scale=0.3, mods=mods):
            pass

    torch._dynamo.reset()
    once(torch.randint(3, (400,)))
    before = compiled_programs()
    for _ in range(5):
        once(torch.randint(3, (400,)))
    assert compiled_programs() == before


def test_a_captured_tensor_that_cannot_be_rebound_raises() -> None:
    hidden = {"slope": torch.ones(9, dtype=torch.float64, requires_grad=True)}
    mask = MASKS["causal"]
    q, k, v = inputs(mask)
    mods = indexed(lambda score, b, h, q, k: score * hidden["slope"][h], None, mask)
    out = torch.randn_like(v).repeat(1, 2, 1, 1)
    saved = Saved(q, out, out, torch.zeros(2, 4, N).double())
    with pytest.raises(rs.KernelError, match=r'hold it in a closure.*or use backend="eager"'):
        list(flex.attend_backward(saved, k, v, mask.bands, scale=0.3, mods=mods))
