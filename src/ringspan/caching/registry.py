"""The list of everything that ``ringspan.clear_caches()`` empties."""

from __future__ import annotations

from collections.abc import Callable

_clear_functions: list[Callable[[], object]] = []


def on_clear_caches(clear: Callable[[], object]) -> None:
    """Have :func:`clear_caches` call ``clear``. For caches that live as long as the process."""
    _clear_functions.append(clear)


def clear_caches() -> None:
    """Empty every cache of ringspan: plans, layouts, launch lists and the index tensors kept on devices.

    Results do not change; the next calls compute again what was cached. A plan that the program holds keeps the
    schedule that was made of it. Tensors that captured CUDA graphs read are released too, so a graph captured before
    this call must not be replayed after it.
    """
    for clear in _clear_functions:
        clear()
