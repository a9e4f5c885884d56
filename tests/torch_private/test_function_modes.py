"""The stack of torch function modes is as it was after modes have been removed from it for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ringspan.torch_private.function_modes import function_mode_stack, without_modes


class Named(TorchFunctionMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Removed(Named): ...


@pytest.fixture
def modes() -> Iterator[dict[str, Named]]:
    """a (b) c (d): those in brackets are of class Removed."""
    made = {name: (Removed if name in "bd" else Named)(name) for name in "abcd"}
    with ExitStack() as stack:
        for mode in made.values():
            stack.enter_context(mode)
        yield made


def names() -> str:
    return "".join(getattr(mode, "name", "*") for mode in function_mode_stack())


def test_all_modes(modes: dict[str, Named]) -> None:
    with without_modes():
        assert names() == ""
    assert names() == "abcd"


def test_modes_of_a_class(modes: dict[str, Named]) -> None:
    with without_modes(of=Removed):
        assert names() == "ac"
    assert names() == "abcd"


@pytest.mark.parametrize(("down_to", "kept"), [("a", ""), ("b", "a"), ("d", "abc")])
def test_modes_down_to_one(modes: dict[str, Named], down_to: str, kept: str) -> None:
    with without_modes(down_to=modes[down_to]):
        assert names() == kept
    assert names() == "abcd"


def test_a_mode_that_was_entered_twice_is_removed_from_its_inner_place(modes: dict[str, Named]) -> None:
    with modes["b"], without_modes(down_to=modes["b"]):
        assert names() == "abcd"
    assert names() == "abcd"


def test_modes_come_back_after_an_error(modes: dict[str, Named]) -> None:
    with pytest.raises(ZeroDivisionError), without_modes(of=Removed):
        _ = 1 / 0
    assert names() == "abcd"


def test_a_default_device_set_meanwhile_stays_at_the_bottom(modes: dict[str, Named]) -> None:
    try:
        with without_modes(of=Removed):
            torch.set_default_device("meta")
            assert names() == "*ac"
        assert names() == "*abcd"
    finally:
        torch.set_default_device(None)
    assert names() == "abcd"


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize(("down_to", "during"), [("a", "+"), ("b", "a+"), ("c", "ab+")])
def test_modes_entered_meanwhile_stay_above(modes: dict[str, Named], device: str | None, down_to: str, during: str) -> None:
    removed = without_modes(down_to=modes[down_to])
    try:
        removed.__enter__()
        torch.set_default_device(device)
        bottom = "*" if device else ""
        with Named("+"):
            assert names() == bottom + during
            removed.__exit__(None, None, None)
            assert names() == bottom + "abcd+"
        assert names() == bottom + "abcd"
    finally:
        torch.set_default_device(None)
