"""Replayed launches of FlashAttention-4, with a fake of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringspan.kernels.relaunch import Relauncher


def program(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, cuts: Tensor | None, own: Any) -> None:
    out.copy_(scale * (q + 2 * k + 3 * v))
    lse.copy_((out if cuts is None else out + cuts.sum()).sum(-1))


class Package:
    """Looks up a program as FlashAttention-4 does, and counts its calls."""

    def __init__(self, *, own: Any = None, launches: int = 1) -> None:
        self.own, self.launches, self.calls = own, launches, 0
        self.compile_cache: dict[str, Callable[..., None]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, cuts: Tensor | None = None) -> Any:
        self.calls += 1
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
        if "program" not in self.compile_cache:
            self.compile_cache["program"] = program
        for _ in range(self.launches):
            self.compile_cache["program"](q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale, cuts, self.own)
        return out, lse, None, None, None


def draw(rows: int = 4) -> list[Tensor]:
    return [torch.randn(1, rows, 2, 8) for _ in range(3)]


def check(relaunch: Relauncher, q: Tensor, k: Tensor, v: Tensor, scale: float = 0.5, **options: Any) -> None:
    out, lse = relaunch(q, k, v, softmax_scale=scale, **options)
    want, want_lse, *_ = Package()(q, k, v, softmax_scale=scale, cuts=options.get("cuts"))
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_the_second_call_is_replayed() -> None:
    package = Package()
    relaunch = Relauncher(package)
    for _ in range(3):
        check(relaunch, *draw())
    assert package.calls == 1
    assert package.compile_cache == {"program": program}


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
    package = Package()
    relaunch = Relauncher(package)
    check(relaunch, *draw())
    tensors, options = other()
    check(relaunch, *tensors, **options)
    assert package.calls == 2


def test_constant_arguments_are_replayed() -> None:
    package = Package(own=(None, (1, 2.0), [True, "x"]))
    relaunch = Relauncher(package)
    for _ in range(2):
        check(relaunch, *draw())
    assert package.calls == 1


def test_a_record_keeps_no_tensor_of_the_call_alive() -> None:
    relaunch = Relauncher(Package())
    check(relaunch, *draw())
    (launch,) = relaunch._launches.values()
    assert launch is not None
    assert not any(isinstance(x, Tensor) for x in launch.arguments)


def test_shared_tensors_are_part_of_the_record() -> None:
    package = Package()
    relaunch = Relauncher(package)
    cuts, other = torch.tensor([0.0, 4.0]), torch.tensor([0.0, 5.0])
    for given in (cuts, cuts, other, cuts):
        check(relaunch, *draw(), cuts=given, shared=[given])
    assert package.calls == 2


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(Package(own=torch.zeros(1)), id="a tensor of its own"),
        pytest.param(Package(own=(None, [torch.zeros(1)])), id="a tensor inside another argument"),
        pytest.param(Package(own=object()), id="an unknown object, such as a stream"),
        pytest.param(Package(launches=2), id="two programs"),
    ],
)
def test_calls_that_cannot_be_replayed_go_to_the_package(package: Package) -> None:
    relaunch = Relauncher(package)
    for n in range(3):
        check(relaunch, *draw())
        assert package.calls == n + 1


def test_a_call_with_the_same_tensor_twice_is_not_replayed() -> None:
    relaunch = Relauncher(Package())
    q, k, v = draw()
    check(relaunch, q, q, v)
    check(relaunch, q, k, v)


def test_unaligned_tensors_go_to_the_package() -> None:
    package = Package()
    relaunch = Relauncher(package)
    check(relaunch, *draw())
    _, k, v = draw()
    odd = torch.randn(1 + 4 * 2 * 8)[1:].view(1, 4, 2, 8)
    check(relaunch, odd, k, v)
    assert package.calls == 2


def test_a_package_without_a_program_cache_is_called_every_time() -> None:
    calls = []

    def package(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float) -> Any:
        calls.append(q)
        return Package()(q, k, v, softmax_scale=softmax_scale)

    relaunch = Relauncher(package)
    for _ in range(2):
        check(relaunch, *draw())
    assert len(calls) == 2


def test_a_failing_call_restores_the_program_cache() -> None:
    package = Package()
    programs = package.compile_cache
    with pytest.raises(TypeError):
        Relauncher(package)(*draw(), softmax_scale=0.5, unknown=1)
    assert package.compile_cache is programs
