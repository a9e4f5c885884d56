"""Whether something is a DTensor, without importing what makes DTensors: nobody can have one before somebody else has."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    # A compiler has imported it, and would look into sys.modules.
    if not torch.compiler.is_compiling() and "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)
