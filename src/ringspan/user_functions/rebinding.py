"""Copy a function with other tensors in place of those it captured.

For ``torch.compile``, which reads the code of a function and its closure. Where a function is only called,
:class:`ringspan.user_functions.captures.SubstituteTensors` replaces its tensors no matter how it holds them.
"""

from __future__ import annotations

import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ringspan.torch_private.module_tables import MODULE_TABLES


def rebind_tensors(x: Any, new: dict[int, Tensor]) -> Any:
    """Copy ``x`` with ``new[id(t)]`` for each tensor t in it: in closures, partials, methods, modules, lists and
    tuples.

    The copy of a function has the same code object, so that a compiler sees other inputs and not another program.
    Closures may refer to themselves and share variables; so do their copies.

    >>> import torch
    >>> def scaled(by: Tensor) -> Callable[[Tensor], Tensor]:
    ...     return lambda x: x * by
    >>> twice, three = scaled(two := torch.tensor(2)), torch.tensor(3)
    >>> rebind_tensors(twice, {id(two): three})(torch.tensor(5))
    tensor(15)
    """
    rebinder = _Rebinder(new)
    copied = rebinder.copy(x)
    rebinder.fill_cells()
    return copied


class _Rebinder:
    """Copies each object once. The copies of cells are filled last, because a cell may refer to itself."""

    def __init__(self, new: dict[int, Tensor]) -> None:
        self._new = new
        self._copies: dict[int, Any] = {}  # by the id of the original, which its holder keeps alive
        self._unfilled: list[tuple[CellType, CellType]] = []

    def copy(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._new.get(id(x), x)
        if id(x) not in self._copies:
            made = self._make(x)
            self._copies.setdefault(id(x), made)
        return self._copies[id(x)]

    def fill_cells(self) -> None:
        while self._unfilled:
            old, new = self._unfilled.pop()
            try:
                contents = old.cell_contents
            except ValueError:  # a variable without a value
                continue
            new.cell_contents = self.copy(contents)

    def _make(self, x: Any) -> Any:
        if isinstance(x, FunctionType) and x.__closure__:
            cells = tuple(self._cell(cell) for cell in x.__closure__)
            function = FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, cells)
            function.__kwdefaults__ = x.__kwdefaults__
            return function
        if isinstance(x, partial):
            keywords = {name: self.copy(value) for name, value in x.keywords.items()}
            return partial(self.copy(x.func), *(self.copy(arg) for arg in x.args), **keywords)
        if isinstance(x, MethodType):
            return MethodType(x.__func__, self.copy(x.__self__))
        if isinstance(x, nn.Module):
            return self._module(x)
        if type(x) is tuple:
            return tuple(self.copy(item) for item in x)
        if type(x) is list:
            items: list[Any] = []
            self._copies[id(x)] = items  # before its items: a list may hold itself
            items += [self.copy(item) for item in x]
            return items
        return x

    def _cell(self, cell: CellType) -> CellType:
        if id(cell) not in self._copies:
            self._copies[id(cell)] = CellType()
            self._unfilled.append((cell, self._copies[id(cell)]))
        found: CellType = self._copies[id(cell)]
        return found

    def _module(self, x: nn.Module) -> nn.Module:
        module = copy.copy(x)
        self._copies[id(x)] = module  # before its fields: a module may hold itself
        for field in MODULE_TABLES:
            held = {name: self.copy(value) for name, value in getattr(x, field).items()}
            object.__setattr__(module, field, held)
        return module
