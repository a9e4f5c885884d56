"""Catch calls of PyTorch's own ``flex_attention`` while a block is open.

It is no operator but a Python function, which compares the lengths of its tensors with those of its BlockMask before it calls
anything that a torch function mode could answer for it; and whoever uses it has imported it by name. So while there is a block
open, in any thread, the function has other code, which asks whether the calling thread is in a block; if not, it does what it
always did. With the last block its own code is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, cast

import torch
from torch import overrides
from torch.nn.attention import flex_attention as module
from torch.overrides import TorchFunctionMode

Answer = Callable[..., Any]
# Who answers a call in the thread that makes it; None: nobody.
Find = Callable[[], Answer | None]

_function = cast(FunctionType, module.flex_attention)

# The function as it is without us, for our own calls.
flex_attention = FunctionType(
    _function.__code__, _function.__globals__, _function.__name__, _function.__defaults__, _function.__closure__
)
flex_attention.__kwdefaults__ = _function.__kwdefaults__


@contextmanager
def without_modes(down_to: TorchFunctionMode | None = None) -> Iterator[None]:
    """All modes are off, or those on top down to this one: for attention that is not for a block to catch.

    They are taken away rather than told to let it pass, since compilers trace into modes that are there.
    """
    with ExitStack() as off:
        while torch._C._len_torch_function_stack():
            mode = off.enter_context(overrides._pop_mode_temporarily())
            if mode is down_to:
                break
        yield


class _Door:
    """Open as long as it was opened more often than closed."""

    def __init__(self) -> None:
        self._lock, self._opened = threading.Lock(), 0
        self._find: Find = lambda: None

    def open(self, find: Find) -> None:
        with self._lock:
            self._opened += 1
            self._find = find
            _function.__code__ = _through.__code__

    def close(self) -> None:
        with self._lock:
            self._opened -= 1
            if not self._opened:
                _function.__code__ = flex_attention.__code__

    @torch._dynamo.disable
    def pass_on(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._find() or flex_attention
        return answer(*args, **kwargs)


door = _Door()


def _through(*args: Any, **kwargs: Any) -> Any:
    # It runs among the globals of PyTorch's module, so it has to find the way back here by itself.
    from ringspan.flex_door import door

    return door.pass_on(*args, **kwargs)


# A compiler that meets this code, or is asked to compile it, is to leave it alone.
torch._dynamo.decorators.skip(_through)
