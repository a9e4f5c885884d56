"""Activation checkpointing: attention that is computed again in the backward pass is computed in the same blocks.

``checkpoint(f, x)`` calls ``f`` a second time in the backward pass, perhaps after the ``with cp:`` block was left. A
block that was opened around the checkpoint would then not be open. So a block that intercepts attention inside a
checkpoint replaces the function which the checkpoint will run by one that enters the block again::

    with cp:                                                  # entered before the checkpoint: entered again
        y = checkpoint(f, x)      f:  attention …
                                      with other: attention   # entered in f itself: f does so again
    y.backward()

The opposite can happen as well: a backward pass in a block runs functions of checkpoints again that were made outside
of it. The block leaves their attention alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch

from ringspan.errors import UnplannedAttention
from ringspan.frontends.generator_frames import kind_of, suspendable_frames, suspended_frame
from ringspan.torch_private.checkpoints import (
    NO_BACKWARD,
    Checkpoint,
    any_hooks,
    current_backward,
    is_recomputing,
    non_reentrant_checkpoints,
    reentrant_checkpoints,
)

Block = AbstractContextManager[Any]
B = TypeVar("B")


class InBlocks:
    """Calls a function inside blocks, the innermost last. ``contexts`` are entered before the blocks: they restore the
    settings of the forward pass, such as those of ``ringspan.compat``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.contexts: list[Block] = []
        self.blocks: list[Block] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as entered:
            for block in (*self.contexts, *self.blocks):
                entered.enter_context(block)
            return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The entry of a block by this thread."""

    block: Block
    checkpoints: frozenset[int]
    """The checkpoints around the entry, by their keys."""
    hides_others: bool
    generators: list[FrameType]
    """The frames of generators around the entry that may be suspended inside the block, the innermost first."""
    backward: int
    """The number of the backward pass around the entry."""


# What to do about a block inside which a generator is suspended.
TO_LEAVE = {
    "generator": "leave the block before the yield or, if the block is meant for the caller, make the generator a context "
    "manager with contextlib.contextmanager",
    "async generator": "leave the block before the yield or, if the block is meant for the caller, make the generator a "
    "context manager with contextlib.asynccontextmanager",
    "coroutine": "leave the block before the await, or let an event loop run the coroutine",
}


class _Entries(threading.local):
    """The blocks that this thread has entered and not left, the innermost last. Not those that compiled code has
    entered."""

    def __init__(self) -> None:
        self.stack: list[Entry] = []


_entries = _Entries()
# The entries made by the current task (for example an asyncio task), and those that the task which started it had made
# by then.
_of_task: ContextVar[tuple[Entry, ...]] = ContextVar("ringspan_blocks", default=())


def note_entry(block: Block, *, hides_others: bool = False) -> Entry:
    """Note that a block was entered. ``hides_others``: the blocks around it have no effect inside."""
    keys = frozenset([checkpoint.key for checkpoint in _surrounding_checkpoints()])
    entry = Entry(block, keys, hides_others, suspendable_frames(), current_backward())
    _entries.stack.append(entry)
    _of_task.set((*_of_task.get(), entry))
    return entry


def note_exit(block: Block) -> None:
    """Note that a block was left. Does nothing for an entry by compiled code."""
    of_block = [entry for entry in _entries.stack if entry.block is block]
    if of_block:
        left = next((entry for entry in reversed(_of_task.get()) if entry in of_block), of_block[-1])
        _entries.stack.remove(left)
        _of_task.set(tuple([entry for entry in _of_task.get() if entry is not left]))
        left.generators.clear()  # a task started in the block may hold the entry, and a frame holds its variables


def is_entered_here(block: Block) -> bool:
    """Return whether the current task, and not only another task of this thread, has entered the block.

    The block must be on the thread's stack of function modes. Raises if a generator has entered the block and is
    suspended inside it: the caller of the generator is not inside the block.
    """
    if _entries.stack == [*_of_task.get()] and not any(entry.generators for entry in _entries.stack):
        return True  # the common case: one task, and no generator
    here = [entry for entry in _entries.stack if entry.block is block and entry in _of_task.get()]
    if not here:
        # Entered by compiled code, which notes no entry; or by another task.
        return not any(entry.block is block for entry in _entries.stack)
    check_not_suspended(here[-1])
    return True


def check_not_suspended(entry: Entry) -> None:
    """Raise if the block was entered in a generator that is suspended."""
    generator = suspended_frame(entry.generators) if entry.generators else None
    if generator is not None:
        kind = kind_of(generator)
        where = "local_attention()" if entry.hides_others else "a block (`with cp:`)"
        raise UnplannedAttention(
            f"attention or sharding was called while the {kind} {generator.f_code.co_qualname} is suspended inside {where}: "
            f"{TO_LEAVE[kind]}"
        )


def check_no_other_task() -> None:
    """Raise if another task of this thread is inside a block, for code that depends on all blocks of the thread."""
    if any(entry not in _of_task.get() for entry in _entries.stack):
        raise UnplannedAttention(
            "another task of this thread is suspended inside a block (`with cp:`): compiled attention and local_attention() "
            "cannot tell their blocks apart. Do not await inside the block, or run the other task in a thread of its own"
        )


def entered_blocks() -> list[Block]:
    """Return the blocks that have an effect here, the innermost last."""
    return [entry.block for entry in _effective_entries()]


def _effective_entries() -> list[Entry]:
    entries: list[Entry] = []
    for entry in _entries.stack:
        if entry not in _of_task.get():
            continue
        if entry.hides_others:
            entries.clear()
        else:
            entries.append(entry)
    return entries


def check_no_suspended_generator() -> None:
    """Raise if the innermost block that has an effect here was entered in a generator that is suspended: this is its
    caller. It may have entered a block of its own, and so does the recomputation of a checkpoint."""
    for entry in _effective_entries()[-1:]:
        check_not_suspended(entry)


def blocks_of_task(kind: type[B]) -> list[B]:
    """Return the blocks of a type that the current task has entered and not left, the innermost last.

    Blocks inside which ``local_attention()`` is open are among them: their tensors keep their layouts. In the
    recomputation of a checkpoint, they are the blocks of its forward pass. Raises if a generator is suspended inside
    one of them.
    """
    of_task = [entry for entry in _entries.stack if isinstance(entry.block, kind) and entry in _of_task.get()]
    for entry in of_task:
        check_not_suspended(entry)
    return [entry.block for entry in of_task if isinstance(entry.block, kind) and not was_absent_in_forward(entry.block)]


def keep_blocks(blocks: list[Block], *, compiled: bool = False) -> None:
    """Make each checkpoint around this call enter blocks again when it recomputes: those of ``blocks`` that were
    entered before the checkpoint.

    Raises inside the forward pass of any other autograd function that needs a gradient, because its backward pass could
    recompute attention outside the block. Does not raise for ``compiled`` code, which itself runs in such a function.
    """
    for checkpoint in _surrounding_checkpoints() if blocks else []:
        function = checkpoint.function
        if isinstance(function, InBlocks) and function.blocks:
            continue  # by an earlier call of attention in this checkpoint
        is_around = [not _is_inside(checkpoint, block, blocks[:n].count(block)) for n, block in enumerate(blocks)]
        if function is not None:
            around = [block for block, is_outside in zip(blocks, is_around, strict=True) if is_outside]
            if around:
                _in_blocks(checkpoint, function).blocks = around
        elif is_around[-1] and not compiled:  # the innermost block, which has intercepted the call
            name = type(checkpoint.owner).__name__.removesuffix("Backward")
            raise UnplannedAttention(
                f"attention in the forward pass of the autograd function {name}: if its backward pass computes it again, that "
                "would be outside the block. Open the block inside the function, or use torch.utils.checkpoint"
            )


def contexts_of_recomputation() -> list[list[Block]]:
    """Return, for each checkpoint around this call, the contexts in which its function will run again. More can be
    added."""
    found = [(checkpoint, checkpoint.function) for checkpoint in _surrounding_checkpoints()]
    return [_in_blocks(checkpoint, function).contexts for checkpoint, function in found if function is not None]


def _in_blocks(checkpoint: Checkpoint, function: Callable[..., Any]) -> InBlocks:
    if isinstance(function, InBlocks):
        return function
    wrapped = InBlocks(function)
    checkpoint.replace_function(wrapped)
    return wrapped


def was_absent_in_forward(block: Block) -> bool:
    """Return whether a checkpoint recomputes this call, and the block was not open in the forward pass.

    If the block was open in the forward pass, the checkpoint has entered it again during the current backward pass.
    """
    backward = current_backward()
    if backward == NO_BACKWARD:
        return False
    entries = [entry.backward for entry in _entries.stack if entry.block is block]  # of this thread only
    return entries[-1:] != [backward] and is_recomputing()


def keep_entered_blocks() -> None:
    """Let the checkpoints around a call by compiled code run their functions again in the blocks around them.

    Raises if a generator is suspended inside the innermost.
    """
    check_no_suspended_generator()
    blocks = entered_blocks()
    if blocks and was_absent_in_forward(blocks[-1]):
        raise UnplannedAttention(
            "a backward pass inside the block runs a compiled function of a checkpoint again that was first called outside "
            "of it, and attention would not be the same: call backward() outside of the block"
        )
    keep_blocks(blocks, compiled=True)


def _is_inside(checkpoint: Checkpoint, block: Block, n: int) -> bool:
    """Return whether a block was entered inside a checkpoint, at the n-th of its entries."""
    entries = [entry for entry in _entries.stack if entry.block is block]
    return n < len(entries) and checkpoint.key in entries[n].checkpoints


def _surrounding_checkpoints() -> list[Checkpoint]:
    found = non_reentrant_checkpoints() if any_hooks() else []
    if not torch.is_grad_enabled():  # a reentrant checkpoint turns gradients off
        found += reentrant_checkpoints()
    return found
