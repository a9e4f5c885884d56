"""The activation checkpoints (``torch.utils.checkpoint``) that surround a call, and the functions that they will run
again.

A non-reentrant checkpoint installs hooks for saved tensors. The function that packs a tensor holds the object of the
checkpoint, whose ``recompute_fn`` runs again in the backward pass. A reentrant checkpoint is an autograd function: its
``forward`` is on the stack of Python, and its ``ctx.run_function`` runs again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

# (ignore_is_tracing) -> the innermost hooks (pack, unpack) of this thread, or None.
innermost_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
# () -> the number of the backward pass that this thread is in, or NO_BACKWARD. A backward pass inside another has its
# own.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
NO_BACKWARD = -1

# The functions by which a non-reentrant checkpoint packs saved tensors and computes them again, and their variable that
# is the checkpoint.
PACK_HOOK = "_checkpoint_hook.__init__.<locals>.pack_hook"
UNPACK_HOOK = "_checkpoint_hook.__init__.<locals>.unpack_hook"
FRAME = "frame"


class Checkpoint(NamedTuple):
    """One checkpoint, and the attribute of its ``owner`` that is the function to run again.

    The attribute is None for an autograd function that is not PyTorch's: what its backward pass computes is not known.
    """

    key: int
    owner: Any
    attribute: str | None

    @property
    def function(self) -> Callable[..., Any] | None:
        return None if self.attribute is None else getattr(self.owner, self.attribute)

    def replace_function(self, function: Callable[..., Any]) -> None:
        assert self.attribute is not None  # checked by the caller
        setattr(self.owner, self.attribute, function)


def any_hooks() -> bool:
    """Return whether this thread has hooks for saved tensors, as inside a non-reentrant checkpoint."""
    return innermost_hooks(True) is not None


def non_reentrant_checkpoints() -> list[Checkpoint]:
    """Return the non-reentrant checkpoints around this call, the outermost first."""
    hooks: list[Any] = []
    while (top := innermost_hooks(True)) is not None:
        hooks.insert(0, top)
        _pop_hooks()
    for pack, unpack in hooks:
        _push_hooks(pack, unpack)
    frames = [inspect.getclosurevars(pack).nonlocals[FRAME] for pack, _ in hooks if _qualified_name(pack) == PACK_HOOK]
    return [Checkpoint(id(frame), frame, "recompute_fn") for frame in frames]


def reentrant_checkpoints() -> list[Checkpoint]:
    """Return the reentrant checkpoints around this call, the outermost first.

    Other autograd functions that need a gradient are among them.
    """
    found: list[Checkpoint] = []
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_name != "forward" or code.co_varnames[:1] == ("self",):  # a module
            continue
        ctx = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code is CheckpointFunction.forward.__code__:
            found.insert(0, Checkpoint(id(ctx), ctx, "run_function"))
        elif isinstance(ctx, FunctionCtx) and any(ctx.needs_input_grad):  # type: ignore[attr-defined]
            found.insert(0, Checkpoint(id(ctx), ctx, None))
    return found


def is_recomputing() -> bool:
    """Return whether a checkpoint around this call is running its function again. Only calls in a backward pass can
    be."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code is CheckpointFunction.backward.__code__ or code.co_qualname == UNPACK_HOOK:
            return True
    return False


def _qualified_name(function: Any) -> str:
    return getattr(function, "__qualname__", "")
