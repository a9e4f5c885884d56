"""What is said to compilers, said without importing one: PyTorch's takes longer to import than all of ringspan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def same_every_time(function: F) -> F:
    """``torch.compiler.assume_constant_result``: a compiler is to call the function once and not to look into it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
