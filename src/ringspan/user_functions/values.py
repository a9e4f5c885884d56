"""The digest of the values that a function uses: captured tensors, and globals that its code names.

:func:`~ringspan.user_functions.digests.function_digest` covers code and constants, which is cheap. This one reads every
element of every tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ringspan.user_functions.digests import function_digest, names_of


def values_digest(functions: Iterable[Callable[..., Any]], tensors: Iterable[Tensor]) -> str:
    """Return sixteen hex digits of the functions, of the globals that they name, and of the values of these tensors.

    >>> scale = torch.tensor([2.0])
    >>> before = values_digest([], [scale])
    >>> _ = scale.add_(1)
    >>> values_digest([], [scale]) == before
    False
    """
    found = hashlib.sha256()
    for function in functions:
        found.update(function_digest(function).encode())
        found.update(repr(sorted(_globals(function, {}).items())).encode())
    for x in tensors:
        found.update(f"{x.dtype} {tuple(x.shape)}".encode())
        found.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _globals(function: Any, found: dict[str, str]) -> dict[str, str]:
    """Return the plain values among the globals that a function names, and those of functions among them."""
    plain = getattr(function, "__wrapped__", function)
    if not isinstance(plain, FunctionType):
        return found
    for name in sorted(names_of(plain) & plain.__globals__.keys()):
        value, key = plain.__globals__[name], f"{plain.__module__}.{name}"
        if key in found:
            continue
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, tuple)):
            found[key] = repr(value)
        elif isinstance(value, FunctionType) and value.__module__ == plain.__module__:
            found[key] = function_digest(value)
            _globals(value, found)
    return found
