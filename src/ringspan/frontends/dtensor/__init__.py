"""DTensors as q, k and v: attention of the shards (``attention.py``), and user functions on shards (``offsets.py``).

This file recognises DTensors without importing torch.distributed.tensor, which takes long. A program that has a DTensor
has imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    if type(x) is Tensor or type(x) is Parameter:  # the common case, checked in every call
        return False
    # While compiling it is imported in any case, and Dynamo would guard on sys.modules.
    if not torch.compiler.is_compiling() and "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def any_dtensor(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if type(q) is type(k) is type(v) is Tensor:
        return False
    return is_dtensor(q) or is_dtensor(k) or is_dtensor(v)
