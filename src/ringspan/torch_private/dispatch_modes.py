"""The stack of torch dispatch modes of this thread (FakeTensorMode, FlopCounterMode, CommDebugMode, …)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _python_dispatch

dispatch_mode_depth = torch._C._len_torch_dispatch_stack
dispatch_mode_stack = _python_dispatch._get_current_dispatch_mode_stack
TorchDispatchMode = _python_dispatch.TorchDispatchMode
without_dispatch_modes = _python_dispatch._disable_current_modes


def add_flop_formulas(formulas: Mapping[Any, Callable[..., int]]) -> None:
    """Add the formulas of operators to each FlopCounterMode of this thread.

    The mode counts an operator by the formula in its ``flop_registry``, and operators without one as nothing. The
    registry is a copy of PyTorch's that is made with the mode.
    """
    for mode in dispatch_mode_stack():
        if type(mode).__name__ == "_FlopCounterMode":  # importing the class takes 0.1 s
            mode.counter.flop_registry.update(formulas)  # type: ignore[attr-defined]
