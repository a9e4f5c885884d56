"""Launches that are repeated without the package that made them first, with a stand-in for the package."""

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
    """Looks up a program as FlashAttention-4 does, and counts how often it is asked."""

    def __init__(self, *, own: Any = None, launches: int = 1) -> None:
        self.own, self.launches, self.asked = own, launches, 0
        self.compile_cache: dict[str, Callable[..., None]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, cuts: Tensor | None = None) -> Any:
        self.asked += 1
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


def test_the_second_call_of_a_kind_does_not_ask() -> None:
    package = Package()
    relaunch = Relauncher(package)
    for _ in range(3):
        check(relaunch, *draw())
    assert package.asked == 1
    assert package.compile_cache == {"program": program}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: (draw(5), {}), id="shape"),
        pytest.param(lambda: ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw()], {}), id="strides"),
        pytest.param(lambda: (draw(), {"scale": 0.25}), id="option"),
    ],
)
def test_another_kind_is_asked_for(other: Callable[[], tuple[list[Tensor], dict[str, Any]]]) -> None:
    package = Package()
    relaunch = Relauncher(package)
    check(relaunch, *draw())
    tensors, options = other()
    check(relaunch, *tensors, **options)
    assert package.asked == 2


def test_plain_values_are_repeated() -> None:
    package = Package(own=(None, (1, 2.0), [True, "x"]))
    relaunch = Relauncher(package)
    for _ in range(2):
        check(relaunch, *draw())
    assert package.asked == 1


def test_nothing_of_a_call_is_kept_alive() -> None:
    relaunch = Relauncher(Package())
    check(relaunch, *draw())
    (launch,) = relaunch._launches.values()
    assert launch is not None
    assert not any(isinstance(x, Tensor) for x in launch.arguments)


def test_tensors_that_calls_share_stay_in_their_places() -> None:
    package = Package()
    relaunch = Relauncher(package)
    cuts, other = torch.tensor([0.0, 4.0]), torch.tensor([0.0, 5.0])
    for given in (cuts, cuts, other, cuts):
        check(relaunch, *draw(), cuts=given, shared=[given])
    assert package.asked == 2


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(Package(own=torch.zeros(1)), id="a tensor of its own"),
        pytest.param(Package(own=(None, [torch.zeros(1)])), id="one within another argument"),
        pytest.param(Package(own=object()), id="a stream, or whatever it is"),
        pytest.param(Package(launches=2), id="two programs"),
    ],
)
def test_what_cannot_be_repeated_is_asked_for_every_time(package: Package) -> None:
    relaunch = Relauncher(package)
    for n in range(3):
        check(relaunch, *draw())
        assert package.asked == n + 1


def test_two_tensors_in_one_place_are_no_model_for_two_places() -> None:
    relaunch = Relauncher(Package())
    q, k, v = draw()
    check(relaunch, q, q, v)
    check(relaunch, q, k, v)


def test_memory_that_the_package_would_copy_is_not_given_to_its_program() -> None:
    package = Package()
    relaunch = Relauncher(package)
    check(relaunch, *draw())
    _, k, v = draw()
    odd = torch.randn(1 + 4 * 2 * 8)[1:].view(1, 4, 2, 8)
    check(relaunch, odd, k, v)
    assert package.asked == 2


def test_a_package_that_keeps_its_programs_elsewhere() -> None:
    asked = []

    def package(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float) -> Any:
        asked.append(q)
        return Package()(q, k, v, softmax_scale=softmax_scale)

    relaunch = Relauncher(package)
    for _ in range(2):
        check(relaunch, *draw())
    assert len(asked) == 2


def test_a_call_that_fails_leaves_the_package_as_it_was() -> None:
    package = Package()
    programs = package.compile_cache
    with pytest.raises(TypeError):
        Relauncher(package)(*draw(), softmax_scale=0.5, unknown=1)
    assert package.compile_cache is programs
