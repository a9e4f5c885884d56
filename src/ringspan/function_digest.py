"""What ranks can compare of a function that each of them has: its code, and the numbers it holds.

Functions that differ in nothing of this may still differ, in the values of the tensors they hold: to look at those would take
longer than to call the function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor


def function_digest(function: Callable[..., Any]) -> str:
    """Sixteen hex digits, equal in all processes that have made the function of the same source with the same numbers.

    >>> def times(n: float) -> Callable[[float], float]:
    ...     return lambda x: x * n
    >>> function_digest(times(2)) == function_digest(times(2)), function_digest(times(2)) == function_digest(times(3))
    (True, False)
    """
    return hashlib.sha256(repr(_said(function, ())).encode()).hexdigest()[:16]


def _said(x: Any, inside: tuple[int, ...]) -> Any:
    """A value in words that are the same in every process; ``inside`` are the ids of those that hold it."""
    if x is None or isinstance(x, (bool, int, float, complex, str, bytes)):
        return x
    if id(x) in inside:  # a function may hold itself
        return "itself"
    inside = (*inside, id(x))
    if isinstance(x, FunctionType):
        held = (*(_content(cell) for cell in x.__closure__ or ()), x.__defaults__, x.__kwdefaults__)
        return _code(x.__code__), [_said(value, inside) for value in held]
    if isinstance(x, MethodType):
        return _said(x.__func__, inside), _said(x.__self__, inside)
    if isinstance(x, partial):
        return [_said(value, inside) for value in (x.func, x.args, x.keywords)]
    if isinstance(x, (list, tuple)):
        return [_said(value, inside) for value in x]
    if isinstance(x, dict):
        return [(str(key), _said(value, inside)) for key, value in x.items()]
    if isinstance(x, Tensor):
        return str(x.dtype), tuple(x.shape)
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


@lru_cache(maxsize=256)
def _code(code: CodeType) -> tuple[Any, ...]:
    """What it does, and not where it stands: files lie elsewhere on other machines."""
    return code.co_code, code.co_names, tuple(_constant(x) for x in code.co_consts)


def _constant(x: Any) -> Any:
    if isinstance(x, CodeType):
        return _code(x)
    return sorted(map(repr, x)) if isinstance(x, frozenset) else x  # whose order is another in every process
