"""Kernel launches that PyTorch's dispatcher does not see: those of Triton and of FlashAttention-4.

:func:`launch` calls a compiled kernel. While :func:`observe_launches` is active, its observer is told about every
launch of this thread. This is how :mod:`ringspan.engine.recording` learns of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

Kernel = Callable[..., Any]


class NotRecordable(Exception):
    """A pass cannot be recorded, for this reason. It is executed as usual."""


class LaunchObserver(Protocol):
    """An object that is told about launches."""

    def record_launch(self, kernel: Kernel, arguments: tuple[Any, ...], keyword_arguments: dict[str, Any]) -> None:
        """Record a launch that has been made."""


class _State(threading.local):
    observer: LaunchObserver | None = None


_state = _State()


@contextmanager
def observe_launches(observer: LaunchObserver) -> Iterator[None]:
    """Tell ``observer`` about the launches of this thread."""
    before, _state.observer = _state.observer, observer
    try:
        yield
    finally:
        _state.observer = before


def launch(kernel: Kernel, *arguments: Any, **keyword_arguments: Any) -> Any:
    """Call a compiled kernel, and tell the observer."""
    result = kernel(*arguments, **keyword_arguments)
    note_launch(kernel, *arguments, **keyword_arguments)
    return result


def note_launch(kernel: Kernel, *arguments: Any, **keyword_arguments: Any) -> None:
    """Tell the observer about a launch that has been made."""
    if _state.observer is not None:
        _state.observer.record_launch(kernel, arguments, keyword_arguments)


class ObservedKernels:
    """A mapping of compiled kernels, each of which is called by :func:`launch`."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def __contains__(self, key: Hashable) -> bool:
        return key in self.kernels

    def __setitem__(self, key: Hashable, kernel: Any) -> None:
        self.kernels[key] = kernel

    def __getitem__(self, key: Hashable) -> Any:
        kernel = self.kernels[key]
        return lambda *arguments, **keyword_arguments: launch(kernel, *arguments, **keyword_arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)
