"""Whether something is a DTensor, without importing what makes DTensors: nobody can have one before somebody else has."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    if type(x) is Tensor or type(x) is Parameter:  # which nearly all are, and every call asks
        return False
    # A compiler has imported it, and would look into sys.modules.
    if not torch.compiler.is_compiling() and "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)
