"""Functions that ranks may and may not take for the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.function_digest import function_digest


class Bias:
    def __init__(self, reach: int) -> None:
        self.bias = torch.zeros(reach)

    def here(self, score: Any) -> Any:
        return score + self.bias

    def there(self, score: Any) -> Any:
        return score - self.bias


def scaled(by: Any) -> Callable[..., Any]:
    return lambda score: score * by


def with_inner(by: float) -> Callable[..., Any]:
    return scaled(scaled(by))


def holds_itself() -> Callable[..., Any]:
    def again(n: int) -> int:
        return again(n - 1) if n else 0

    return again


# makers of functions: what they make twice is the same, what two of them make is not
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
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_twice_and_nothing_else(name: str) -> None:
    digests = {other: function_digest(make()) for other, make in MAKERS.items()}
    assert [other for other, digest in digests.items() if digest == function_digest(MAKERS[name]())] == [name]


def test_other_processes_find_the_same() -> None:
    script = """from tests.test_function_digest import MAKERS, function_digest
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
