"""Intercept calls of PyTorch's ``flex_attention`` in threads that are inside a ringspan context (``with cp:``).

``flex_attention`` is a Python function, not an operator. It compares the lengths of its tensors with those of its
BlockMask before it calls anything that a torch function mode could intercept, and users import it by name. So ringspan
replaces its code permanently by a wrapper with the same parameters::

    def flex_attention(query, key, value, …):
        if ringspan_intercepts():                             # this thread is inside a context
            return ringspan_intercepted(query, key, value, …)
        return ringspan_original(query, key, value, …)

The condition depends only on this thread's stack of torch function modes, and Dynamo guards all compiled code by that
stack. Therefore other threads call and compile ``flex_attention`` as before while this thread is inside a context, and
code compiled outside a context is not used inside one. Inside a context the intercepted call is a graph break, unless
the innermost mode can trace it.

The original code is never restored, because a thread that compiles ``flex_attention`` reads it several times. Code that
was compiled before the wrapper is installed is compiled once more. To avoid that, the wrapper is installed when
ringspan is imported, if ``flex_attention`` has been imported by then, and otherwise when the first context is entered.
"""

from __future__ import annotations

import inspect
import sys
import threading
from abc import abstractmethod
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ringspan.torch_private.function_modes import function_mode_at, function_mode_depth

_lock = threading.Lock()
_is_replaced = False  # whether the code has been replaced
# Whether install_flex_interception has run. If the code was replaced, Dynamo then does not trace intercepted calls.
_install_attempted = False
# Why the code of this PyTorch's flex_attention cannot be replaced; None if it can.
_unsupported_reason: str | None = None


class FlexInterceptor(TorchFunctionMode):
    """A torch function mode that also intercepts the calls of ``flex_attention`` of its own thread."""

    @abstractmethod
    def intercept_flex_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``flex_attention(*args, **kwargs)``. All modes are still active during this call."""

    def trace_flex_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result as Dynamo traces it, or None if the call must be a graph break."""
        return None


def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """Call PyTorch's own ``flex_attention`` without interception.

    This function is also an identity marker: ``AttentionCatcher.caught`` receives it as ``func`` and compares it with
    ``is``.
    """
    from ringspan.torch_private.flex_original import original_flex_attention

    return original_flex_attention(*args, **kwargs)


def intercepted_flex_attention(*args: Any, **kwargs: Any) -> Any:
    """Call ``flex_attention`` as a user would: the modes that are on the stack intercept it."""
    from ringspan.torch_private.flex_original import flex_function

    return flex_function(*args, **kwargs)


def install_flex_interception() -> None:
    """Intercept ``flex_attention`` in contexts from now on. Imports torch._dynamo. Later calls do nothing."""
    global _install_attempted, _intercepted_eagerly  # noqa: PLW0603 (there is one flex_attention in a process)
    if _install_attempted:
        return
    from torch import _dynamo

    with _lock:
        if _replace_code() and not _install_attempted:
            reason = "ringspan attends eagerly in this block; drop fullgraph=True"
            _intercepted_eagerly = _dynamo.disable(_intercepted_eagerly, reason=reason)
        _install_attempted = True


def replace_code_if_imported() -> None:
    """Replace the code of ``flex_attention`` if PyTorch's module has been imported. Imports nothing of PyTorch."""
    if "torch.nn.attention.flex_attention" in sys.modules:
        with _lock:
            _replace_code()


def flex_interception_unsupported_reason() -> str | None:
    """Return why ``flex_attention`` cannot be intercepted in this PyTorch, or None if it can."""
    return _unsupported_reason


def _replace_code() -> bool:
    global _is_replaced, _unsupported_reason  # noqa: PLW0603
    from ringspan.torch_private import flex_original

    function = flex_original.flex_function
    _unsupported_reason = flex_original.why_not_replaceable(function)
    if _unsupported_reason is None and not _is_replaced:
        # The code runs among the globals of PyTorch's module.
        _flex_globals().update(
            ringspan_intercepts=_intercepts,
            ringspan_intercepted=_intercepted,
            ringspan_original=flex_original.original_flex_attention,
        )
        function.__code__ = _wrapper(function)
        _is_replaced = True
    return _unsupported_reason is None


def _flex_globals() -> dict[str, Any]:
    from ringspan.torch_private.flex_original import flex_function

    return flex_function.__globals__


def _wrapper(function: Any) -> CodeType:
    """Return the code of the wrapper. Its name, file and line are those of the function, which inspect and Dynamo
    use."""
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
    """Return whether a mode of this thread intercepts flex_attention. Dynamo traces this function."""
    for n in range(function_mode_depth()):  # noqa: SIM110 (Dynamo of torch 2.11 would break the graph at a generator)
        if isinstance(function_mode_at(n), FlexInterceptor):
            return True
    return False


def _innermost() -> FlexInterceptor:
    innermost = None
    for n in range(function_mode_depth()):
        mode = function_mode_at(n)
        if isinstance(mode, FlexInterceptor):
            innermost = mode
    assert innermost is not None  # _intercepts() was True
    return innermost


def _intercepted(*args: Any, **kwargs: Any) -> Any:
    """Return the result of an intercepted call. Dynamo traces this function."""
    if torch.compiler.is_dynamo_compiling():
        result = _innermost().trace_flex_attention(args, kwargs)
        if result is not None:
            return result
    return _intercepted_eagerly(*args, **kwargs)


def _intercepted_eagerly(*args: Any, **kwargs: Any) -> Any:
    return _innermost().intercept_flex_attention(args, kwargs)
