"""Digests of the values that a function uses: equal on all ranks for equal values, and different for different ones."""

from __future__ import annotations

import argparse
import collections
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringspan.user_functions import values
from ringspan.user_functions.values import values_digest


@dataclass
class Config:
    slope: Any = 1.0
    rank: int = 0
    inner: Any = None
    lock: Any = field(default_factory=threading.Lock)

    @property
    def doubled(self) -> Any:
        return self.slope * 2


class ClassConfig:
    slope = 1.0


HELD: Any = 1.0
log = logging.getLogger("tests.user_functions.test_values")
settings = ModuleType("settings")
THRESHOLD = 1.0


def helper(score: Any) -> Any:
    return score * THRESHOLD


@functools.cache
def cached_helper() -> Any:
    return THRESHOLD


def number(score: Any, *_: Any) -> Any:
    return score * HELD


def element(score: Any, *_: Any) -> Any:
    return score * HELD[0]


def entry(score: Any, *_: Any) -> Any:
    return score * HELD["a"]


def attribute(score: Any, *_: Any) -> Any:
    return score * HELD.slope


def inner_attribute(score: Any, *_: Any) -> Any:
    return score * HELD.inner.slope


def by_property(score: Any, *_: Any) -> Any:
    return score * HELD.doubled


def membership(score: Any, *_: Any) -> Any:
    return score * ("a" in HELD)


def of_module(score: Any, *_: Any) -> Any:
    return score * settings.slope


def by_helper(score: Any, *_: Any) -> Any:
    return helper(score) + torch.zeros(1)


def by_cached_helper(score: Any, *_: Any) -> Any:
    return score * cached_helper()


def an_attribute_called_held(score: Any, *_: Any) -> Any:
    return score.HELD


def with_log(score: Any, *_: Any) -> Any:
    log.debug("called")
    return score


class Callee:
    def __call__(self, score: Any, *_: Any) -> Any:
        return score * HELD


def scaled(by: Any) -> Callable[..., Any]:
    return lambda score, *_: score * by


def digest(function: Any, held: Any = None) -> str:
    globals()["HELD"] = held
    return values_digest([function], [])


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    globals().update(HELD=1.0, THRESHOLD=1.0)


def filled(*keys: str) -> dict[str, float]:
    return {key: float(ord(key)) for key in keys}


# A function, and functions that make the values of its global: equal ones of two kinds, and different ones.
CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
    "number": (number, lambda: 1.0, lambda: 1.0, lambda: 2.0),
    "list": (element, lambda: [1.0], lambda: [1.0], lambda: [2.0]),
    "tuple of tensors": (element, lambda: (torch.ones(2),), lambda: (torch.ones(2),), lambda: (torch.zeros(2),)),
    "deque": (element, lambda: collections.deque([1]), lambda: collections.deque([1]), lambda: collections.deque([2])),
    "dict": (entry, lambda: filled("a", "b"), lambda: filled("b", "a"), lambda: {"a": 1.0}),
    "dict of dicts": (entry, lambda: {"a": {"b": 1}}, lambda: {"a": {"b": 1}}, lambda: {"a": {"b": 2}}),
    "dict of tensors": (entry, lambda: {"a": torch.ones(2)}, lambda: {"a": torch.ones(2)}, lambda: {"a": torch.zeros(2)}),
    "ordered dict": (
        entry,
        lambda: collections.OrderedDict(a=1),
        lambda: collections.OrderedDict(a=1),
        lambda: collections.OrderedDict(a=2),
    ),
    "set": (membership, lambda: {"a", "b", "c"}, lambda: {"c", "b", "a"}, lambda: {"a", "b"}),
    "array": (number, lambda: np.ones(3), lambda: np.ones(3), lambda: np.zeros(3)),
    "array of objects": (
        number,
        lambda: np.array([Config(), {1}], dtype=object),
        lambda: np.array([Config(), {1}], dtype=object),
        lambda: np.array([Config(), {2}], dtype=object),
    ),
    "strided tensor": (number, lambda: torch.eye(3)[::2], lambda: torch.eye(3)[::2].clone(), lambda: torch.eye(3)[1:]),
    "parameter": (number, lambda: nn.Parameter(torch.ones(2)), lambda: nn.Parameter(torch.ones(2)), lambda: torch.zeros(2)),
    "bfloat16": (number, lambda: torch.tensor(1.5).bfloat16(), lambda: torch.tensor(1.5).bfloat16(), lambda: torch.ones(())),
    "conjugate": (
        number,
        lambda: torch.tensor([1 + 2j]).conj(),
        lambda: torch.tensor([1 - 2j]),
        lambda: torch.tensor([1 + 2j]),
    ),
    "dtype": (number, lambda: torch.float32, lambda: torch.float32, lambda: torch.bfloat16),
    "object": (attribute, Config, lambda: Config(rank=3), lambda: Config(slope=2.0)),
    "tensor of an object": (
        attribute,
        lambda: Config(torch.ones(2)),
        lambda: Config(torch.ones(2)),
        lambda: Config(torch.zeros(2)),
    ),
    "object in an object": (
        inner_attribute,
        lambda: Config(inner=Config()),
        lambda: Config(inner=Config(rank=1)),
        lambda: Config(inner=Config(2.0)),
    ),
    "property": (by_property, Config, lambda: Config(rank=3), lambda: Config(slope=2.0)),
    "namespace": (
        attribute,
        lambda: SimpleNamespace(slope=1, rank=0),
        lambda: SimpleNamespace(slope=1, rank=1),
        lambda: SimpleNamespace(slope=2),
    ),
    "arguments": (
        attribute,
        lambda: argparse.Namespace(slope=1),
        lambda: argparse.Namespace(slope=1, rank=1),
        lambda: argparse.Namespace(slope=2),
    ),
    "class": (attribute, lambda: ClassConfig, lambda: ClassConfig, lambda: type("ClassConfig", (), {"slope": 2.0})),
    "object whose call uses it": (Callee(), lambda: [1.0], lambda: [1.0], lambda: [2.0]),
    "partial": (functools.partial(number), lambda: [1.0], lambda: [1.0], lambda: [2.0]),
    "function in a closure": (scaled(number), lambda: [1.0], lambda: [1.0], lambda: [2.0]),
    "function in a list": (scaled([number]), lambda: [1.0], lambda: [1.0], lambda: [2.0]),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_values_have_equal_digests(name: str) -> None:
    function, one, same, other = CASES[name]
    assert digest(function, one()) == digest(function, same()) != digest(function, other())


def test_values_changed_in_place() -> None:
    x = torch.ones(2)
    before = digest(entry, {"a": [x]})
    x.add_(1)
    assert values_digest([entry], []) != before


def test_values_of_a_closure() -> None:
    ones, zeros = scaled(np.ones(3)), scaled(np.zeros(3))
    assert digest(ones) == digest(scaled(np.ones(3))) != digest(zeros)


def test_attributes_of_a_module() -> None:
    settings.slope = 1.0  # type: ignore[attr-defined]
    before = digest(of_module)
    settings.rank = 3  # type: ignore[attr-defined]
    assert digest(of_module) == before
    settings.slope = [2.0]  # type: ignore[attr-defined]
    assert digest(of_module) != before
    package = ModuleType("package")
    package.inner = settings  # type: ignore[attr-defined]
    before = digest(inner_attribute, package)
    settings.slope = [3.0]  # type: ignore[attr-defined]
    assert digest(inner_attribute, package) != before


def test_an_attribute_with_the_name_of_a_global_is_not_that_global() -> None:
    assert digest(an_attribute_called_held, 0) == digest(an_attribute_called_held, 1)


@pytest.mark.parametrize("function", [by_helper, by_cached_helper])
def test_globals_of_functions_that_the_function_calls(function: Callable[..., Any]) -> None:
    before = digest(function)
    globals()["THRESHOLD"] = 2.0
    assert digest(function) != before


def test_the_state_of_the_standard_library_is_ignored() -> None:
    """Often, only one rank logs."""
    before = digest(with_log)
    log.setLevel(logging.DEBUG)
    log.addHandler(logging.NullHandler())
    log.debug("fills a cache of the logger")
    try:
        assert digest(with_log) == before
    finally:
        log.setLevel(logging.NOTSET)
        log.handlers.clear()


@pytest.mark.parametrize(
    "held",
    [
        threading.Lock(),
        object(),
        torch.ones(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        torch.empty(0),
        np.ones(()),
        iter([1]),
        open,
        lambda x: x,
    ],
)
def test_anything_has_a_digest(held: Any) -> None:
    assert digest(number, held) == digest(number, held)
    assert digest(element, [held]) == digest(element, [held])


def holds_itself() -> list[Any]:
    x: list[Any] = [1.0]
    array = np.array([None, x], dtype=object)
    array[0] = array
    x += [x, {"itself": x}, array]
    return x


def test_a_container_that_holds_itself() -> None:
    assert digest(element, holds_itself()) == digest(element, holds_itself())


class Node:
    """Has two ways to each of the nodes below: there are 2**40 paths."""

    def __init__(self, depth: int) -> None:
        self.slope = 1.0
        self.left = self.right = Node(depth - 1) if depth else None


def descend(score: Any, *_: Any) -> Any:
    return HELD.left.right.slope


def nested(depth: int) -> list[Any]:
    x: list[Any] = []
    for _ in range(depth):
        x = [x]
    return x


LARGE: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "a long list": (element, lambda n: [1.0] * (10**6 + n)),
    "a long set": (membership, lambda n: {str(x) for x in range(10**6 + n)}),
    "a long dict": (entry, lambda n: {str(x): x for x in range(10**6 + n)}),
    "a large tensor": (number, lambda n: torch.ones(10**8 + n)),
    "many lists": (element, lambda n: [[1.0] * 1000] * (1000 + n)),
    "a text": (number, lambda n: "a" * (10**8 + n)),
    "paths": (descend, lambda n: Node(40 + n)),
    "a deep list": (element, lambda n: nested(5000 + n)),
}


@pytest.mark.parametrize("name", [*LARGE])
def test_the_time_is_bounded(name: str) -> None:
    """Of large values, at least the type and length count."""
    function, make = LARGE[name]
    one, other = make(0), make(1)
    start = time.monotonic()
    found = digest(function, one), digest(function, other)
    assert time.monotonic() - start < 10
    assert (found[0] != found[1]) == (name not in ("paths", "a deep list"))


def test_a_large_array_does_not_hide_other_globals() -> None:
    held = [torch.ones(10**7), 1.0]
    before = digest(element, held)
    held[1] = 2.0
    assert digest(element, held) != before


def many(n: int, *, reverse: bool = False) -> set[str]:
    """Return a set whose elements together exceed the limit, though their number does not."""
    texts = [str(x) * 1024 for x in range(n)]
    return set(reversed(texts) if reverse else texts)


def test_the_limit_does_not_depend_on_the_order_of_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_DESCRIBED", 200)
    assert digest(membership, many(150)) == digest(membership, many(150, reverse=True)) != digest(membership, many(151))
    one, other = ({str(x): "a" * 2048 * (1 + x % 3) for x in order} for order in (range(100), reversed(range(100))))
    assert digest(entry, one) == digest(entry, other)


def test_other_processes_compute_the_same_digests() -> None:
    script = """from tests.user_functions.test_values import CASES, digest
print(*(digest(function, make()) for function, *makers in CASES.values() for make in makers))"""
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
    assert found[0] == found[1] == [digest(function, make()) for function, *makers in CASES.values() for make in makers]
