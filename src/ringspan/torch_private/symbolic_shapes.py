"""Symbolic sizes of compiled programs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.experimental import _config

# Tell the compiler that a condition on symbolic sizes holds; in eager code, raise if it does not.
check_size = torch._check


def distinct_sizes() -> AbstractContextManager[Any]:
    """Give every length a symbol of its own, even if two lengths are equal when the program is compiled."""
    return _config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
