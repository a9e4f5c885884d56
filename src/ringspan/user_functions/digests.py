"""The digest of a function, for ranks to compare: its code, and the numbers it holds.

An object may hold more than a function uses: a layer may store its rank or its process group. So the digest of an
object covers its type, the attributes that the code around it names, and the code of methods among them (always that of
``__call__``, or of a module's ``forward``). The index of a device does not count, in ``"cuda:1"`` or ``torch.device``: every
rank has its own.

Functions with equal digests may still differ: in globals, in attributes that are looked up by computed names, and in
the values of tensors. Comparing those would take longer than calling the function
(:mod:`ringspan.user_functions.values` does, under ``RINGSPAN_DEBUG=1``).
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections import deque
from collections.abc import Callable, Collection
from enum import Enum
from functools import partial
from numbers import Number
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ringspan.caching.by_digest import cache_by_digest
from ringspan.torch_private.module_tables import module_tables

ABSENT = object()
DEVICE = re.compile(r"(cuda|xpu|hpu|npu|mps):\d+")
CONTAINERS = (list, tuple, deque, set, frozenset, dict)


def function_digest(function: Callable[..., Any]) -> str:
    """Return sixteen hex digits, equal in all processes that made the function from the same source with the same
    numbers.

    >>> def times(n: float) -> Callable[[float], float]:
    ...     return lambda x: x * n
    >>> function_digest(times(2)) == function_digest(times(2)), function_digest(times(2)) == function_digest(times(3))
    (True, False)
    """
    return hashlib.sha256(repr(Describer().describe(function)).encode()).hexdigest()[:16]


class Describer:
    """Describes values by plain Python values that are the same in every process, so never by an address."""

    by_value = False  # whether there are limits, and globals count. Most calls of attention describe a function: no method

    def describe(self, x: Any, inside: tuple[int, ...] = (), names: frozenset[str] = frozenset()) -> Any:
        """Describe a value. ``inside`` are the ids of the objects that hold it, ``names`` the names that code among them
        uses."""
        if isinstance(x, Enum):
            return _name(type(x)), x.name
        if self.by_value and not self.is_within_limits(x, len(inside)):
            return _name(type(x)), _length(x)
        if isinstance(x, str):
            device = DEVICE.fullmatch(x)
            return device[1] if device else x
        if x is None or isinstance(x, (bool, int, float, complex, bytes)):
            return x
        if isinstance(x, (Number, np.bool_, torch.dtype, range)) and type(x).__repr__ is not object.__repr__:
            return _name(type(x)), repr(x)
        if isinstance(x, (Tensor, np.ndarray)):
            return self.describe_array(x, inside)
        if isinstance(x, ModuleType):
            return self.describe_module(x, inside, names)
        if id(x) in inside:  # a function may hold itself
            return "itself"
        inside = (*inside, id(x))
        if isinstance(x, FunctionType):
            names |= names_of(x)
            held = (*(_content(cell) for cell in x.__closure__ or ()), x.__defaults__, x.__kwdefaults__)
            found = _code(x.__code__), [self.describe(value, inside, names) for value in held]
            return (*found, self.describe_globals(x, inside, names)) if self.by_value else found
        if isinstance(x, MethodType):
            return [self.describe(value, inside, names | names_of(x.__func__)) for value in (x.__func__, x.__self__)]
        if isinstance(x, BuiltinFunctionType):  # its __self__ is a module, or the object it is a method of
            return x.__name__, self.describe(x.__self__, inside, names)
        if isinstance(x, partial):
            return [self.describe(value, inside, names | names_of(x.func)) for value in (x.func, x.args, x.keywords)]
        if isinstance(x, (list, tuple, deque)):
            return [self.describe(value, inside, names) for value in x]
        if isinstance(x, (set, frozenset)):
            return self.in_order(x, [self.describe(value, inside, names) for value in x])
        if isinstance(x, dict):
            return self.in_order(x, [(self.describe(k, inside, names), self.describe(v, inside, names)) for k, v in x.items()])
        # A module's __call__ is that of torch, and uses a hundred names that do not concern a score_mod.
        names = self.names_for(x, names | {"forward" if isinstance(x, nn.Module) else "__call__"})
        named = ((name, _attribute(x, name)) for name in sorted(names))
        kind = _name(x if isinstance(x, type) else type(x))
        return kind, [(name, self.describe(value, inside, names)) for name, value in named if value is not ABSENT]

    def is_within_limits(self, x: Any, depth: int) -> bool:
        """Return whether to describe a value inside ``depth`` objects, not only its type and length."""
        return True

    def describe_array(self, x: Tensor | np.ndarray[Any, Any], inside: tuple[int, ...]) -> Any:
        return _length(x)

    def describe_module(self, x: ModuleType, inside: tuple[int, ...], names: frozenset[str]) -> Any:
        return x.__name__

    def describe_globals(self, x: FunctionType, inside: tuple[int, ...], names: frozenset[str]) -> Any:
        """Describe the globals that a function uses."""

    def in_order(self, x: Collection[Any], described: list[Any]) -> Any:
        """Return the described elements of a collection in an order that does not depend on how it was filled."""
        return sorted(map(repr, described))

    def names_for(self, x: Any, names: frozenset[str]) -> frozenset[str]:
        """Return the names of the attributes of an object that code with these names uses."""
        return _with_methods(x, names)


def _length(x: Any) -> Any:
    if isinstance(x, (Tensor, np.ndarray)):
        return str(x.dtype), tuple(x.shape)
    return len(x) if isinstance(x, (str, bytes, *CONTAINERS)) else None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _with_methods(x: Any, names: frozenset[str]) -> frozenset[str]:
    """Return the names, and those used by methods of the object with these names, recursively."""
    found, to_do = set[str](), set(names)
    while to_do:
        found |= to_do
        to_do = {other for name in to_do for other in names_of(_attribute(x, name))} - found
    return frozenset(found)


def _attribute(x: Any, name: str) -> Any:
    """Return the attribute of an object, looked up without running its code; of a property or static method, its
    function."""
    found = inspect.getattr_static(x, name, ABSENT)
    if isinstance(found, MemberDescriptorType):  # a slot
        return getattr(x, name, ABSENT)
    if isinstance(found, property):
        return found.fget
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    if found is ABSENT and isinstance(x, nn.Module):
        return next((table[name] for table in module_tables(x) if name in table), ABSENT)
    return found


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return None


def names_of(function: Any) -> frozenset[str]:
    """Return the names of globals and attributes that the code of a function uses."""
    return _names_in(function.__code__) if isinstance(function, FunctionType) else frozenset()


@cache_by_digest(256, plain=True)
def _names_in(code: CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*(_names_in(x) for x in code.co_consts if isinstance(x, CodeType)))


@cache_by_digest(256, plain=True)
def _code(code: CodeType) -> tuple[Any, ...]:
    """Return the instructions, names and constants; no file names, which differ between machines."""
    return code.co_code, code.co_names, tuple(_constant(x) for x in code.co_consts)


def _constant(x: Any) -> Any:
    if isinstance(x, CodeType):
        return _code(x)
    return sorted(map(repr, x)) if isinstance(x, frozenset) else x  # a frozenset has another order in every process
