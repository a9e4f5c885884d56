"""The checkpoints around a call, and the functions that they run again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringspan.torch_private.checkpoints import (
    NO_BACKWARD,
    any_hooks,
    current_backward,
    is_recomputing,
    non_reentrant_checkpoints,
    reentrant_checkpoints,
)


def test_the_checkpoints_around_a_call_are_found() -> None:
    found: list[list[int]] = []

    def note(x: Tensor) -> Tensor:
        found.append([len(non_reentrant_checkpoints()), len(reentrant_checkpoints())])
        return x * x

    def inner(x: Tensor) -> Tensor:
        return checkpoint(note, x, use_reentrant=False)  # type: ignore[no-any-return]

    x = torch.ones(3, requires_grad=True)
    note(x)
    checkpoint(note, x, use_reentrant=False)
    checkpoint(inner, x, use_reentrant=False)
    checkpoint(note, x, use_reentrant=True)
    assert found == [[0, 0], [1, 0], [2, 0], [0, 1]]
    assert not any_hooks()


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_function_that_runs_again_can_be_replaced(reentrant: bool) -> None:
    def square(x: Tensor) -> Tensor:
        calls.append("square")
        for around in reentrant_checkpoints() + non_reentrant_checkpoints():
            original = around.function
            around.replace_function(lambda *args, original=original: (calls.append("again"), original(*args))[1])
        return x * x

    calls: list[str] = []
    x = torch.full((2,), 3.0, requires_grad=True)
    checkpoint(square, x, use_reentrant=reentrant).sum().backward()
    assert calls == ["square", "again", "square"]
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_told_from_the_first_call_and_from_other_backward_passes(reentrant: bool) -> None:
    noted: list[tuple[bool, bool]] = []

    def note(x: Tensor) -> Tensor:
        noted.append((current_backward() != NO_BACKWARD, is_recomputing()))
        return x * x

    x = torch.ones(3, requires_grad=True)
    y = checkpoint(note, x, use_reentrant=reentrant)
    y.register_hook(lambda grad: noted.append((current_backward() != NO_BACKWARD, is_recomputing())))
    y.sum().backward()
    assert noted == [(False, False), (True, False), (True, True)]
    assert current_backward() == NO_BACKWARD
