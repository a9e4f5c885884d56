"""What is said to compilers, said without importing one: PyTorch's takes longer to import than all of ringspan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])


def same_every_time(function: F) -> F:
    """``torch.compiler.assume_constant_result``: a compiler is to call the function once and not to look into it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled(function: F) -> F:
    """``torch.compiler.disable``: compiled code breaks off, calls the function as it is, and goes on behind it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo")  # if nobody has imported it, nobody compiles
        return (function if compiler is None else compiler.disable(function))(*args, **kwargs)

    return cast(F, call)
