"""Replayed launches of FlashAttention-4, with a stand-in for its forward function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringspan.kernels.fa4_launch_cache import LaunchCache


def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, cuts: Tensor | None, own: Any) -> None:
    out.copy_(scale * (q + 2 * k + 3 * v))
    lse.copy_((out if cuts is None else out + cuts.sum()).sum(-1))


class ForwardFunction:
    """Looks up a compiled kernel as FlashAttention-4 does, and counts its own calls."""

    def __init__(self, *, own: Any = None, launches: int = 1, keyword_arguments: bool = False) -> None:
        self.own, self.launches, self.calls = own, launches, 0
        self.keyword_arguments = keyword_arguments
        self.compile_cache: dict[str, Callable[..., None]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, cuts: Tensor | None = None) -> Any:
        self.calls += 1
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
        if "kernel" not in self.compile_cache:
            self.compile_cache["kernel"] = kernel
        for _ in range(self.launches):
            arguments = q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale, cuts
            if self.keyword_arguments:
                self.compile_cache["kernel"](*arguments, own=self.own)
            else:
                self.compile_cache["kernel"](*arguments, self.own)
        return out, lse, None, None, None


def draw(rows: int = 4) -> list[Tensor]:
    return [torch.randn(1, rows, 2, 8) for _ in range(3)]


def check(cache: LaunchCache, q: Tensor, k: Tensor, v: Tensor, scale: float = 0.5, **options: Any) -> None:
    out, lse = cache(q, k, v, softmax_scale=scale, **options)
    want, want_lse, *_ = ForwardFunction()(q, k, v, softmax_scale=scale, cuts=options.get("cuts"))
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_the_second_call_is_replayed() -> None:
    forward = ForwardFunction()
    cache = LaunchCache(forward)
    for _ in range(3):
        check(cache, *draw())
    assert forward.calls == 1
    assert forward.compile_cache == {"kernel": kernel}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: (draw(5), {}), id="shape"),
        pytest.param(lambda: ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw()], {}), id="strides"),
        pytest.param(lambda: (draw(), {"scale": 0.25}), id="option"),
    ],
)
def test_other_shapes_strides_and_options_are_recorded_separately(
    other: Callable[[], tuple[list[Tensor], dict[str, Any]]],
) -> None:
    forward = ForwardFunction()
    cache = LaunchCache(forward)
    check(cache, *draw())
    tensors, options = other()
    check(cache, *tensors, **options)
    assert forward.calls == 2


def test_constant_arguments_are_replayed() -> None:
    forward = ForwardFunction(own=(None, (1, 2.0), [True, "x"]))
    cache = LaunchCache(forward)
    for _ in range(2):
        check(cache, *draw())
    assert forward.calls == 1


def test_a_record_keeps_no_tensor_of_the_call_alive() -> None:
    cache = LaunchCache(ForwardFunction())
    check(cache, *draw())
    (launch,) = cache._launches.values()
    assert launch is not None
    assert not any(isinstance(x, Tensor) for x in launch.arguments)


def test_shared_tensors_are_part_of_the_record() -> None:
    forward = ForwardFunction()
    cache = LaunchCache(forward)
    cuts, other = torch.tensor([0.0, 4.0]), torch.tensor([0.0, 5.0])
    for given in (cuts, cuts, other, cuts):
        check(cache, *draw(), cuts=given, shared=[given])
    assert forward.calls == 2


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(ForwardFunction(own=torch.zeros(1)), id="a tensor of its own"),
        pytest.param(ForwardFunction(own=(None, [torch.zeros(1)])), id="a tensor inside another argument"),
        pytest.param(ForwardFunction(own=object()), id="an unknown object, such as a stream"),
        pytest.param(ForwardFunction(launches=2), id="two kernels"),
    ],
)
def test_calls_that_cannot_be_replayed_call_the_forward_function(forward: ForwardFunction) -> None:
    cache = LaunchCache(forward)
    for n in range(3):
        check(cache, *draw())
        assert forward.calls == n + 1


def test_a_call_that_passes_keyword_arguments_is_not_replayed() -> None:
    forward = ForwardFunction(keyword_arguments=True)
    cache = LaunchCache(forward)
    for n in range(3):
        check(cache, *draw())
        assert forward.calls == n + 1


def test_a_call_with_the_same_tensor_twice_is_not_replayed() -> None:
    cache = LaunchCache(ForwardFunction())
    q, k, v = draw()
    check(cache, q, q, v)
    check(cache, q, k, v)


def test_unaligned_tensors_call_the_forward_function() -> None:
    forward = ForwardFunction()
    cache = LaunchCache(forward)
    check(cache, *draw())
    _, k, v = draw()
    odd = torch.randn(1 + 4 * 2 * 8)[1:].view(1, 4, 2, 8)
    check(cache, odd, k, v)
    assert forward.calls == 2


def test_a_forward_function_without_a_compile_cache_is_called_every_time() -> None:
    calls = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float) -> Any:
        calls.append(q)
        return ForwardFunction()(q, k, v, softmax_scale=softmax_scale)

    cache = LaunchCache(forward)
    for _ in range(2):
        check(cache, *draw())
    assert len(calls) == 2


def test_a_failing_call_restores_the_compile_cache() -> None:
    forward = ForwardFunction()
    kernels = forward.compile_cache
    with pytest.raises(TypeError):
        LaunchCache(forward)(*draw(), softmax_scale=0.5, unknown=1)
    assert forward.compile_cache is kernels
