"""A function with other tensors in the place of those it captured, for compilers, which read a function and not what it calls.

Where a function is just called, :class:`ringspan.user_functions.captures.Swapped` does the same whatever way it holds them.
"""

from __future__ import annotations

import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn


def rebound(x: Any, new: dict[int, Tensor]) -> Any:
    """``x`` with ``new[id(t)]`` for each tensor t that is in it: in closures, partials, methods and modules.

    The code of a function stays the same object, so that a compiler sees other inputs and not another program.

    >>> import torch
    >>> def scaled(by: Tensor) -> Callable[[Tensor], Tensor]:
    ...     return lambda x: x * by
    >>> twice, three = scaled(two := torch.tensor(2)), torch.tensor(3)
    >>> rebound(twice, {id(two): three})(torch.tensor(5))
    tensor(15)
    """
    if isinstance(x, Tensor):
        return new.get(id(x), x)
    if isinstance(x, FunctionType) and x.__closure__:
        cells = tuple(CellType(rebound(cell.cell_contents, new)) for cell in x.__closure__)
        other = FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, cells)
        other.__kwdefaults__ = x.__kwdefaults__
        return other
    if isinstance(x, partial):
        keywords = {name: rebound(value, new) for name, value in x.keywords.items()}
        return partial(rebound(x.func, new), *(rebound(arg, new) for arg in x.args), **keywords)
    if isinstance(x, MethodType):
        return MethodType(x.__func__, rebound(x.__self__, new))
    if isinstance(x, nn.Module):
        other_module = copy.copy(x)
        for field in ("_parameters", "_buffers", "_modules"):
            held = {name: rebound(value, new) for name, value in getattr(x, field).items()}
            object.__setattr__(other_module, field, held)
        return other_module
    if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
        return type(x)(rebound(item, new) for item in x)
    return x
