"""PyTorch's ``flex_attention``, and a copy of it that ringspan never changes.

Importing this module imports PyTorch's, which takes longer than importing all of ringspan.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from torch.nn.attention import flex_attention as flex_module

# The function that users import, typed as Any because its overloads do not matter here.
flex_function: Any = flex_module.flex_attention


def why_not_replaceable(function: Any) -> str | None:
    """Return why the code of a function cannot be replaced, or None if it can."""
    if not isinstance(function, FunctionType):
        return f"it is a {type(function).__name__}, not a function"
    code = function.__code__
    if code.co_freevars:  # Python refuses code with other free variables
        return f"it was made inside another function and uses its {', '.join(code.co_freevars)}"
    if code.co_posonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return f"it takes {inspect.signature(function)}, which the wrapper cannot pass on by name"
    return None


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# For ringspan's own kernels: no block intercepts it, and programs compiled from it stay valid when the wrapper is
# installed.
original_flex_attention: Any = _copy(flex_function) if why_not_replaceable(flex_function) is None else flex_function
