"""Intercept calls of PyTorch's ``flex_attention`` in threads that have a block open.

``flex_attention`` is a Python function, not an operator. It compares the lengths of its tensors with those of its
BlockMask before it calls anything that a torch function mode could intercept, and users import it by name. So ringspan
replaces its code, once and for good, by a wrapper with the same parameters::

    def flex_attention(query, key, value, …):
        if ringspan_intercepts():                             # this thread has a block open
            return ringspan_intercepted(query, key, value, …)
        return ringspan_original(query, key, value, …)

The condition depends on this thread's stack of torch function modes alone, and Dynamo guards every compiled program by
that stack. So other threads call and compile ``flex_attention`` as ever while a block is open here, and a program
compiled outside a block is not used inside one. Inside a block the intercepted call is a graph break.

The code is never put back: a thread that compiles ``flex_attention`` reads it several times. Programs that were
compiled before the wrapper is installed are compiled once more. So it is installed when ringspan is imported, if
``flex_attention`` has been imported by then, and else when the first block is opened.
"""

from __future__ import annotations

import inspect
import sys
import threading
from abc import abstractmethod
from types import CodeType
from typing import Any

from torch.overrides import TorchFunctionMode

from ringspan.torch_private.function_modes import function_mode_at, function_mode_depth

_lock = threading.Lock()
# Whether the code has been replaced; whether, moreover, Dynamo has been told not to trace intercepted calls.
_is_replaced, _is_ready = False, False
# Why the code of this PyTorch's flex_attention cannot be replaced; None if it can.
_obstacle: str | None = None


class FlexInterceptor(TorchFunctionMode):
    """A torch function mode that also intercepts calls of ``flex_attention``, those of its own thread."""

    @abstractmethod
    def intercept_flex_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``flex_attention(*args, **kwargs)``. All modes are still active."""


def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's own ``flex_attention``, without interception. ``AttentionCatcher.caught`` gets it as ``func``."""
    from ringspan.torch_private.flex_original import original_flex_attention

    return original_flex_attention(*args, **kwargs)


def install_flex_interception() -> None:
    """Intercept ``flex_attention`` in blocks from now on. Imports torch._dynamo; later calls do nothing."""
    global _is_ready  # noqa: PLW0603 (there is one flex_attention in a process)
    if _is_ready:
        return
    import torch._dynamo

    with _lock:
        if _replace_code() and not _is_ready:
            traced = torch._dynamo.disable(_intercepted, reason="ringspan attends eagerly in this block; drop fullgraph=True")
            _flex_globals()["ringspan_intercepted"] = traced
        _is_ready = True


def replace_code_if_imported() -> None:
    """Replace the code of ``flex_attention`` if PyTorch's module has been imported. Imports nothing of PyTorch."""
    if "torch.nn.attention.flex_attention" in sys.modules:
        with _lock:
            _replace_code()


def flex_interception_obstacle() -> str | None:
    """Why ``flex_attention`` cannot be intercepted in this PyTorch, or None if it can."""
    return _obstacle


def _replace_code() -> bool:
    global _is_replaced, _obstacle  # noqa: PLW0603
    from ringspan.torch_private import flex_original

    function = flex_original.flex_function
    _obstacle = flex_original.why_not_replaceable(function)
    if _obstacle is None and not _is_replaced:
        # The code runs among the globals of PyTorch's module.
        _flex_globals().update(
            ringspan_intercepts=_intercepts,
            ringspan_intercepted=_intercepted,
            ringspan_original=flex_original.original_flex_attention,
        )
        function.__code__ = _wrapper(function)
        _is_replaced = True
    return _obstacle is None


def _flex_globals() -> dict[str, Any]:
    from ringspan.torch_private.flex_original import flex_function

    return flex_function.__globals__


def _wrapper(function: Any) -> CodeType:
    """The code of the wrapper. Name, file and line are the function's own: ``inspect`` and Dynamo's rules use them."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    defined = ", ".join([*positional, *(["*"] if keyword else []), *keyword])
    passed = ", ".join([*positional, *(f"{name}={name}" for name in keyword)])
    source = (
        f"def {function.__name__}({defined}):\n"
        f"    if ringspan_intercepts():\n"
        f"        return ringspan_intercepted({passed})\n"
        f"    return ringspan_original({passed})\n"
    )
    own = function.__code__
    code = compile(source, own.co_filename, "exec", dont_inherit=True)
    wrapper = next(x for x in code.co_consts if isinstance(x, CodeType))
    return wrapper.replace(co_firstlineno=own.co_firstlineno, co_qualname=own.co_qualname)


def _intercepts() -> bool:
    """Whether a mode of this thread intercepts flex_attention. Dynamo traces this."""
    for n in range(function_mode_depth()):  # noqa: SIM110 (Dynamo of torch 2.11 would break the graph at a generator)
        if isinstance(function_mode_at(n), FlexInterceptor):
            return True
    return False


def _intercepted(*args: Any, **kwargs: Any) -> Any:
    stack = [function_mode_at(n) for n in range(function_mode_depth())]
    innermost = [mode for mode in stack if isinstance(mode, FlexInterceptor)][-1]
    return innermost.intercept_flex_attention(args, kwargs)
