"""Find out whether a ``with`` block was entered by a generator, and whether that generator is suspended.

The caller of a suspended generator runs while the block of the generator is open, but it is not inside the block::

    def results():
        with cp:
            yield attention(q, k, v)      # suspended here, inside the block

    for out in results():
        attention(q, k, v)                # not inside the block

It makes no difference whether the generator enters the block itself, by a function or by a context manager. Async
generators behave alike. A coroutine that no event loop runs is suspended in its caller's context, and counts as a
generator, too.

A generator that is the body of a context manager, or of a fixture of pytest, is suspended on purpose: the block is
meant for the code that runs meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dis import opmap
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_ITERABLE_COROUTINE
from types import FrameType

# Packages whose frames only pass on the entry of a block.
PASSING_ON = ("ringspan", "contextlib", "torch")
# Packages that suspend a generator in order to run other code inside its blocks.
DRIVERS = ("_pytest", "pluggy", "pytest_asyncio", "anyio")

COROUTINE = CO_COROUTINE | CO_ITERABLE_COROUTINE
SUSPENDABLE = CO_GENERATOR | CO_ASYNC_GENERATOR | COROUTINE

# Where the code of a suspended frame goes on: documented operands of RESUME.
YIELD_VALUE, RESUME = opmap["YIELD_VALUE"], opmap["RESUME"]
AFTER_AWAIT = 3


def suspendable_frames() -> list[FrameType]:
    """Return the frames of generators on the stack whose callers are not meant to be inside a block that is entered
    now, the innermost first. Coroutines are among them if no event loop runs."""
    found: list[FrameType] = []
    has_coroutine = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        flags = frame.f_code.co_flags & SUSPENDABLE
        if flags and _package(frame) not in PASSING_ON:
            driver = "" if frame.f_back is None else _package(frame.f_back)
            if driver in DRIVERS and not flags & COROUTINE:
                break
            if driver != "contextlib":  # else the block belongs to the code that uses the context manager
                found.append(frame)
                has_coroutine = has_coroutine or bool(flags & COROUTINE)
        frame = frame.f_back
    if has_coroutine and _in_event_loop():  # which gives every task a context of its own
        return [frame for frame in found if not frame.f_code.co_flags & COROUTINE]
    return found


def suspended_frame(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the innermost of these frames that has not finished, if its caller is running and not it itself."""
    for frame in frames:
        if _is_running(frame):
            return None
        resumes = _resumes(frame)
        if resumes is None:
            continue  # finished, so the block belongs to its caller
        awaits = frame.f_code.co_flags & CO_ASYNC_GENERATOR and resumes == AFTER_AWAIT
        if not awaits or not _in_event_loop():
            return frame
        # Else the whole task waits, and another one, which was started inside the block, runs.
    return None


def kind_of(frame: FrameType) -> str:
    if frame.f_code.co_flags & COROUTINE:
        return "coroutine"
    return "async generator" if frame.f_code.co_flags & CO_ASYNC_GENERATOR else "generator"


def _is_running(generator: FrameType) -> bool:
    """Return whether the generator of this frame is on the stack of this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not generator:
        frame = frame.f_back
    return frame is not None


def _resumes(frame: FrameType) -> int | None:
    """Return the operand of the RESUME at which the code of a frame goes on. None if it has finished."""
    code, last = frame.f_code.co_code, frame.f_lasti
    if code[last] == YIELD_VALUE:  # the last instruction before Python 3.13
        last += 2
    return code[last + 1] & 3 if code[last] == RESUME else None


def _in_event_loop() -> bool:
    """Return whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _package(frame) != "trio":
            frame = frame.f_back
        return frame is not None
    return True


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
