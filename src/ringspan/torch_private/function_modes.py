"""The stack of torch function modes of this thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

# Context managers: disable modes and the ``__torch_function__`` of subclasses; disable only that of subclasses; enable
# both again.
disable_torch_function = torch._C.DisableTorchFunction
disable_subclass_torch_function = torch._C.DisableTorchFunctionSubclass
enable_torch_function = torch._C._EnableTorchFunction

function_mode_depth = torch._C._len_torch_function_stack
# (n) -> the n-th mode of this thread; the innermost is the last.
function_mode_at = torch._C._get_function_stack_at
_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack


def function_mode_stack() -> list[Any]:
    """Return the modes of this thread, the innermost last."""
    return [function_mode_at(n) for n in range(function_mode_depth())]


@contextmanager
def without_modes(*, down_to: TorchFunctionMode | None = None, of: type = TorchFunctionMode) -> Iterator[None]:
    """Remove modes while the context is open: those of a class, or the innermost ones up to and with ``down_to``.

    They are removed rather than disabled, since Dynamo traces into modes that are on the stack. Each one is put back
    directly above the mode that it was entered in. Modes that were entered meanwhile and are still open, as by the
    caller of a generator that is suspended in this context, stay above it, and a default device at the bottom.
    """
    stack = function_mode_stack()
    first = 0 if down_to is None else max(n for n, mode in enumerate(stack) if mode is down_to)
    is_kept = [n < first or not isinstance(mode, of) for n, mode in enumerate(stack)]
    _set_stack([mode for mode, kept in zip(stack, is_kept, strict=True) if kept])
    try:
        yield
    finally:
        restored = function_mode_stack()
        place = int(bool(restored) and isinstance(restored[0], DeviceContext))
        for mode, kept in zip(stack, is_kept, strict=True):
            if not kept:
                restored.insert(place, mode)
                place += 1
            else:
                place = next((n + 1 for n in range(place, len(restored)) if restored[n] is mode), place)
        _set_stack(restored)


def remove_mode(mode: TorchFunctionMode) -> None:
    """Remove the innermost entry of a mode, wherever it is on the stack of this thread."""
    stack = function_mode_stack()
    last = max((n for n, entered in enumerate(stack) if entered is mode), default=None)
    if last is not None:
        _set_stack([*stack[:last], *stack[last + 1 :]])


def _set_stack(modes: Sequence[Any]) -> None:
    while function_mode_depth():
        _pop()
    for mode in modes:
        _push(mode)
