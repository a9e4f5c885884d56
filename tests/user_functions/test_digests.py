"""Digests of functions: equal for equal functions, in every process, and different for different ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ringspan as rs
from ringspan.user_functions.digests import function_digest


class Bias:
    def __init__(self, reach: int) -> None:
        self.bias = torch.zeros(reach)

    def here(self, score: Any) -> Any:
        return score + self.bias

    def there(self, score: Any) -> Any:
        return score - self.bias


class Ramp:
    """Reads one attribute in a method, and has another whose value differs in every process."""

    def __init__(self, slope: float) -> None:
        self.slope = slope
        self.owner = self
        self.made_at = id(object())

    def __call__(self, score: Any) -> Any:
        return score * self.owner.steepness()

    def steepness(self) -> float:
        return self.slope


class Steeper(Ramp):
    def steepness(self) -> float:
        return self.slope + 1


@dataclass(frozen=True, slots=True)
class Config:
    cap: float


class Learned(nn.Module):
    def __init__(self, heads: int, inner: Ramp) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads))
        self.inner = inner

    def forward(self, score: Any) -> Any:
        return self.inner(score) + self.bias


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


def capped(config: Any) -> Callable[..., Any]:
    return lambda score: score.clamp(max=config.cap)


def scaled(by: Any) -> Callable[..., Any]:
    return lambda score: score * by


def with_inner(by: float) -> Callable[..., Any]:
    return scaled(scaled(by))


def holds_itself() -> Callable[..., Any]:
    def again(n: int) -> int:
        return again(n - 1) if n else 0

    return again


# Each maker makes functions with equal digests; those of two makers differ.
MAKERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "cap 2": lambda: rs.softcap(2.0),
    "cap 3": lambda: rs.softcap(3.0),
    "alibi": lambda: rs.alibi(torch.ones(4)),
    "alibi of more heads": lambda: rs.alibi(torch.ones(8)),
    "a number in a function in a function": lambda: with_inner(2),
    "another there": lambda: with_inner(3),
    "a partial": lambda: partial(scaled, 2),
    "of another number": lambda: partial(scaled, by=3),
    "a method": lambda: Bias(3).here,
    "another": lambda: Bias(3).there,
    "code": lambda: lambda score: score in {"one", "two", "three"},
    "of other constants": lambda: lambda score: score in {"one", "two", "four"},
    "of other names": lambda: lambda score: score.sin(),
    "that holds itself": holds_itself,
    "a dict by objects": lambda: scaled({Ramp(1.0): 2.0}),
    "of another value": lambda: scaled({Ramp(1.0): 3.0}),
    "by functions": lambda: scaled({with_inner: 2.0}),
    "a dict by text": lambda: scaled({"1": 2.0}),
    "by numbers": lambda: scaled({1: 2.0}),
    "an object": lambda: Ramp(1.0),
    "an object of another number": lambda: Ramp(2.0),
    "an object of another method": lambda: Steeper(1.0),
    "a method of an object": lambda: Ramp(1.0).steepness,
    "a method of another number": lambda: Ramp(2.0).steepness,
    "a slot": lambda: capped(Config(1.0)),
    "another slot": lambda: capped(Config(2.0)),
    "a module": lambda: Learned(4, Ramp(1.0)),
    "of more heads": lambda: Learned(8, Ramp(1.0)),
    "that has another": lambda: Learned(4, Ramp(2.0)),
    "an enum": lambda: scaled(Side.LEFT),
    "its other": lambda: scaled(Side.RIGHT),
    "a set": lambda: scaled({"one", "two", "three"}),
    "another set": lambda: scaled({"one", "two", "four"}),
    "a built-in": lambda: scaled(torch.sin),
    "another built-in": lambda: scaled(torch.cos),
    "a method of a dict": lambda: scaled({1: 2.0}.get),
    "of another dict": lambda: scaled({1: 3.0}.get),
    "numpy's 2": lambda: scaled(np.int64(2)),
    "numpy's 3": lambda: scaled(np.int64(3)),
    "numpy's 2.0": lambda: scaled(np.float32(2)),
    "numpy's 3.0": lambda: scaled(np.float32(3)),
    "numpy's True": lambda: scaled(np.True_),
    "numpy's False": lambda: scaled(np.False_),
    "a half": lambda: scaled(Fraction(1, 2)),
    "a third": lambda: scaled(Fraction(1, 3)),
    "an array": lambda: scaled(np.zeros(3)),
    "a longer array": lambda: scaled(np.zeros(4)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_digests_for_one_maker_only(name: str) -> None:
    digests = {other: function_digest(make()) for other, make in MAKERS.items()}
    assert [other for other, digest in digests.items() if digest == function_digest(MAKERS[name]())] == [name]


@pytest.mark.parametrize("hold", [scaled, lambda device: scaled({"device": device}), Ramp], ids=["closure", "dict", "object"])
@pytest.mark.parametrize("device", [str, torch.device])
def test_the_index_of_a_device_does_not_count(hold: Callable[[Any], Callable[..., Any]], device: Callable[[str], Any]) -> None:
    assert function_digest(hold(device("cuda:0"))) == function_digest(hold(device("cuda:1")))
    assert function_digest(hold("cuda:0")) != function_digest(hold("cpu"))


def test_other_processes_compute_the_same_digests() -> None:
    script = """from tests.user_functions.test_digests import MAKERS, function_digest
print(*(function_digest(make()) for make in MAKERS.values()))"""
    paths = os.pathsep.join(sys.path)
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed},
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] == [function_digest(make()) for make in MAKERS.values()]
