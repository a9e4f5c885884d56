"""PyTorch's ``flex_attention``, and the code that it has while a block is open.

Importing this imports PyTorch's compiler, which takes longer than all of ringspan: only who meets FlexAttention does.

What was compiled before stays compiled. PyTorch keeps programs by the code they were made of, and what inlines a function
watches which code that has. So a compiled ``flex_attention`` that is called in a block finds code for which there is no program
and which is not to be compiled; and after the block it finds the program of its own code where it left it.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch.nn.attention import flex_attention as module

from ringspan.torch_private.flex_door import door

_function: Any = module.flex_attention


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@torch._dynamo.disable
def pass_on(*args: Any, **kwargs: Any) -> Any:
    """A call that was made while a block is open, in whatever thread."""
    return (door.who_answers() or flex_attention)(*args, **kwargs)


def _through(*args: Any, **kwargs: Any) -> Any:
    # It runs among the globals of PyTorch's module, so it has to find the way back here by itself.
    from ringspan.torch_private.flex_code import pass_on

    return pass_on(*args, **kwargs)


# A compiler that meets this code, or is asked to compile it, is to leave it alone.
torch._dynamo.decorators.skip(_through)


def why_not() -> str | None:
    """Why the function cannot be given other code; None: it can. Code with other free variables than its own Python refuses."""
    if not isinstance(_function, FunctionType):
        return f"it is a {type(_function).__name__} and no function"
    if _function.__code__.co_freevars != _through.__code__.co_freevars:
        return f"it was made inside another function and uses its {', '.join(_function.__code__.co_freevars)}"
    return None


# The function as it is without us, for our own calls.
flex_attention = _function if why_not() else _copy(_function)


def swap_in() -> None:
    _function.__code__ = _through.__code__


def put_back() -> None:
    _function.__code__ = flex_attention.__code__
