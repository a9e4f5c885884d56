"""Show the calls of TorchScript functions to the torch function modes of ringspan.

Functions of ``torch.jit`` run in an interpreter that no torch function mode sees. So the ``__call__`` of their two
classes is wrapped when the first context (``with cp:``) is entered. The wrapper stays: outside a context it reads the
depth of the stack of modes and nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import wraps
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from ringspan.torch_private.function_modes import function_mode_at, function_mode_depth

_lock = Lock()
_is_installed = False
_operators: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()


class ScriptWatcher(TorchFunctionMode):
    """A torch function mode that is told of the TorchScript functions that its thread calls."""

    @abstractmethod
    def before_script_call(self, name: str, operators: tuple[str, ...]) -> None:
        """Inspect a call: the name of the function, and its operators in their order (``"aten::softmax"``)."""


def install_script_watching() -> None:
    """Show calls to the modes from now on. Later calls of this function do nothing."""
    global _is_installed  # noqa: PLW0603 (the classes of torch.jit exist once in a process)
    if _is_installed:
        return
    with _lock:
        if not _is_installed:
            for kind in (torch.ScriptFunction, torch.ScriptMethod):
                kind.__call__ = _watched(kind.__call__)  # type: ignore[method-assign]
            _is_installed = True


def _watched(call: Any) -> Any:
    @wraps(call)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        for n in range(function_mode_depth() - 1, -1, -1):
            mode = function_mode_at(n)
            if isinstance(mode, ScriptWatcher):
                mode.before_script_call(self.name, _operators_of(self))
                break
        return call(self, *args, **kwargs)

    return watched


def _operators_of(function: Any) -> tuple[str, ...]:
    """Return the operators of a function and of those that it calls. Computed once for each function."""
    found = _operators.get(function)
    if found is None:
        found = _operators[function] = tuple(_kinds(function.inlined_graph))
    return found


def _kinds(block: Any) -> Iterator[str]:
    """Yield the operators of a graph. A matrix product with a parameter is a linear layer, however it is written."""
    for node in block.nodes():
        kind = node.kind()
        yield "aten::linear" if kind in _PRODUCTS and any(_is_parameter(value) for value in node.inputs()) else kind
        for inner in node.blocks():
            yield from _kinds(inner)


def _is_parameter(value: Any) -> bool:
    """Return whether a value is an attribute of a module or a constant, perhaps transposed or in another dtype."""
    node = value.node()
    inputs = [*node.inputs()]
    if node.kind() in _VIEWS:
        return _is_parameter(inputs[0])
    if node.kind() == "prim::ListConstruct":  # the operands of einsum
        return any(_is_parameter(x) for x in inputs)
    return node.kind() in ("prim::GetAttr", "prim::Constant") and value.type().kind() == "TensorType"


_PRODUCTS = frozenset(
    {"aten::matmul", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv", "aten::inner"}
    | {"aten::einsum", "aten::tensordot"}
)
_VIEWS = frozenset(
    {"aten::t", "aten::numpy_T", "aten::mT", "aten::transpose", "aten::permute", "aten::view", "aten::reshape"}
    | {"aten::unsqueeze", "aten::contiguous", "aten::to"}
)
