"""The stack of torch function modes of this thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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

    They are removed rather than disabled, since Dynamo traces into modes that are on the stack.
    ``torch.set_default_device`` may put a mode at the bottom of the stack meanwhile. So each removed mode is put back
    by its distance from the top.
    """
    stack = function_mode_stack()
    first = 0 if down_to is None else max(n for n, mode in enumerate(stack) if mode is down_to)
    is_kept = [n < first or not isinstance(mode, of) for n, mode in enumerate(stack)]
    _set_stack([mode for mode, kept in zip(stack, is_kept, strict=True) if kept])
    try:
        yield
    finally:
        now = function_mode_stack()
        restored = list(now)
        for n, mode in enumerate(stack):
            if not is_kept[n]:
                removed_before, kept_above = is_kept[:n].count(False), is_kept[n:].count(True)
                restored.insert(max(0, len(now) - kept_above) + removed_before, mode)
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
