"""Decorators that configure torch.compile without importing torch._dynamo.

Importing torch._dynamo takes longer than importing all of ringspan.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])


def dynamo_constant(function: F) -> F:
    """Mark a function as ``torch.compiler.assume_constant_result`` does: Dynamo calls the function while tracing; its
    result is a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def dynamo_disable(function: F) -> F:
    """Mark a function as ``torch.compiler.disable`` does: a graph break; the function itself runs eagerly."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # While it is not imported, or another thread is importing it, nothing is being compiled.
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        return (function if disable is None else disable(function))(*args, **kwargs)

    return cast(F, call)


def without_compilation() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly while the context is open. Does not import torch._dynamo."""
    compiler = sys.modules.get("torch._dynamo")  # while it is not imported, nothing is compiled
    return nullcontext() if compiler is None else torch.compiler.set_stance("force_eager")


def load_dynamo() -> None:
    """Import torch._dynamo, as PyTorch does at the first operator under a dispatch mode.

    Threads that meet such an operator at the same time may find half of the module.
    """
    with _loading:
        import_module("torch._dynamo")


_loading = threading.Lock()


def dynamo_config(**options: Any) -> AbstractContextManager[Any]:
    """Set options of Dynamo while the context is open. Imports torch._dynamo."""
    from torch._dynamo import config

    return config.patch(**options)
