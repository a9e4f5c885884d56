"""The digest of the values that a function uses: captured tensors, and globals that its code names.

:func:`~ringspan.user_functions.digests.function_digest` covers code and constants, which is cheap. This one reads every
element of every captured tensor. Of a global, it covers

* a number, a text, an array and a tensor: the value;
* a list, a tuple, a set and a dict: all elements, whether the function uses them or not;
* an object, a class and a module: the attributes that the code names; of a module no functions and classes;
* a function of the same package: its code, and the globals that it names.

It ignores the code of other packages, attributes that are looked up by computed names, and the elements of sparse
tensors, DTensors and other subclasses. Of what exceeds the limits below it covers types and lengths. A tensor that the
function uses is captured, so its elements count at any size.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from dis import get_instructions
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ringspan.caching.by_digest import cache_by_digest
from ringspan.user_functions.digests import CONTAINERS, Describer, function_digest

# The values that are described for one function; 1 KiB of an array or a text counts as one. A quarter for any one value.
MAX_DESCRIBED = 2**14
MAX_DEPTH = 32
# Packages whose objects may have a different state in each process: loggers, locks, the rank.
STATEFUL = sys.stdlib_module_names | {"ringspan"}
# Packages whose functions are not searched for globals.
LIBRARIES = STATEFUL | {"numpy", "torch"}


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
        found.update(repr(ValueDescriber().describe(_unwrapped(function))).encode())
    for x in tensors:
        found.update(f"{x.dtype} {tuple(x.shape)}".encode())
        found.update(_bytes(x))
    return found.hexdigest()[:16]


class ValueDescriber(Describer):
    """Describes arrays by their elements, and functions with their globals."""

    by_value = True

    def __init__(self) -> None:
        self.left = MAX_DESCRIBED

    def is_within_limits(self, x: Any, depth: int) -> bool:
        size = 1
        if isinstance(x, (str, bytes)):
            size += len(x) // 1024
        elif isinstance(x, CONTAINERS):
            size += len(x)
        elif isinstance(x, np.ndarray) or _has_elements(x):
            size += x.nbytes // 1024
        if size > MAX_DESCRIBED // 4 or depth > MAX_DEPTH:
            return False
        self.left = max(0, self.left - size)
        return self.left > 0

    def describe_array(self, x: Tensor | np.ndarray[Any, Any], inside: tuple[int, ...]) -> Any:
        shape = super().describe_array(x, inside)
        if isinstance(x, Tensor):
            return (*shape, hashlib.sha256(_bytes(x)).hexdigest()) if _has_elements(x) else shape
        if x.dtype.hasobject:  # its bytes are addresses
            held: Iterable[Any] = () if id(x) in inside else x.flat
            return (*shape, [self.describe(value, (*inside, id(x))) for value in held])
        return (*shape, hashlib.sha256(x.tobytes()).hexdigest())

    def describe_module(self, x: ModuleType, inside: tuple[int, ...], names: frozenset[str]) -> Any:
        if id(x) in inside:
            return x.__name__
        values = [(name, vars(x)[name]) for name in sorted(names & vars(x).keys())]
        described = [(name, self.describe(value, (*inside, id(x)), names)) for name, value in values if _is_data(value)]
        return x.__name__, described

    def describe_globals(self, x: FunctionType, inside: tuple[int, ...], names: frozenset[str]) -> Any:
        if _package(x) in LIBRARIES:
            return None
        used = [(name, _unwrapped(x.__globals__[name])) for name in sorted(_globals_in(x.__code__) & x.__globals__.keys())]
        return [
            (name, value.__qualname__ if _is_foreign(value, x) else self.describe(value, inside, names)) for name, value in used
        ]

    def in_order(self, x: Collection[Any], described: list[Any]) -> Any:
        # The elements beyond the limit are others in each process.
        return super().in_order(x, described) if self.left else len(x)

    def names_for(self, x: Any, names: frozenset[str]) -> frozenset[str]:
        kind = x if isinstance(x, type) else type(x)
        return names if _package(kind) in STATEFUL else super().names_for(x, names)


@cache_by_digest(256, plain=True)
def _globals_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals that code reads. An attribute of the same name, as in ``q.device``, is no global."""
    read = {found.argval for found in get_instructions(code) if found.opname == "LOAD_GLOBAL"}
    return frozenset(read).union(*(_globals_in(x) for x in code.co_consts if isinstance(x, CodeType)))


def _package(x: Any) -> str:
    return str(x.__module__).partition(".")[0]


def _unwrapped(x: Any) -> Any:
    """Return the function in a cache of functools; anything else as it is."""
    wrapped = None if isinstance(x, FunctionType) else inspect.getattr_static(x, "__wrapped__", None)
    return wrapped if isinstance(wrapped, FunctionType) else x


def _is_foreign(x: Any, user: FunctionType) -> bool:
    """Return whether a global is a function or class of another package, whose code is not described."""
    if isinstance(x, FunctionType):
        return _package(x) != _package(user)
    return isinstance(x, BuiltinFunctionType) or (isinstance(x, type) and _package(x) in LIBRARIES)


def _is_data(x: Any) -> bool:
    """Return whether to describe an attribute of a module: no code, and no state of a library."""
    if isinstance(x, ModuleType):
        return x.__name__.partition(".")[0] not in LIBRARIES
    return not isinstance(x, (FunctionType, BuiltinFunctionType, type))


def _has_elements(x: Any) -> bool:
    """Return whether this is a tensor whose elements are in memory."""
    is_plain = type(x) is Tensor or type(x) is nn.Parameter
    return is_plain and x.layout is torch.strided and not x.is_meta and not x.is_quantized


def _bytes(x: Tensor) -> bytes:
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return x.view(-1).view(torch.uint8).numpy().tobytes()
