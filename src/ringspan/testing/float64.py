"""Computation in float64, of code that asks for float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Replaces float32 by float64 wherever a function is asked for it.

    Models compute norms and the softmax of plain attention in float32. The rounding depends on how many tokens there
    are, so it differs between one process and several, and would hide small errors.

    >>> with Float64():
    ...     torch.ones(2, dtype=torch.float64).float().softmax(0, dtype=torch.float32).dtype
    torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = [torch.float64 if x is torch.float32 else x for x in args]
        named = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*wide, **named)
