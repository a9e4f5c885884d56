"""Higher-order operators: operators that call the functions they are given, such as ``torch.cond``."""

from __future__ import annotations

from torch._ops import HigherOrderOperator

__all__ = ["HigherOrderOperator"]
