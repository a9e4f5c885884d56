"""Find out whether a ``with`` block was entered by a generator, and whether that generator is suspended.

The caller of a suspended generator runs while the block of the generator is open, but it is not inside the block::

    def results():
        with cp:
            yield attention(q, k, v)      # suspended here, inside the block

    for out in results():
        attention(q, k, v)                # not inside the block

A generator that is the body of a context manager, or of a fixture of pytest, is suspended on purpose: the block is
meant for the code that runs meanwhile.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType

# Packages whose frames only pass on the entry of a block.
PASSING_ON = ("ringspan", "contextlib", "torch")
# Packages that suspend a generator in order to run other code inside its blocks.
DRIVERS = ("contextlib", "_pytest", "pytest_asyncio", "anyio")


def suspendable_generator() -> FrameType | None:
    """Return the frame that enters a block, if it is one of a generator whose caller is not meant to be inside."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) in PASSING_ON:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_flags & inspect.CO_GENERATOR:
        return None
    return None if frame.f_back is not None and _package(frame.f_back) in DRIVERS else frame


def is_running(generator: FrameType) -> bool:
    """Return whether the generator of this frame is on the stack of this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not generator:
        frame = frame.f_back
    return frame is not None


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
