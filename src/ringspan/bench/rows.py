"""The rows that benchmarks return, and their progress callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""One measurement: values that JSON can hold, by name."""

OnProgress: TypeAlias = Callable[[int, int, str], None]
"""Called as ``on_progress(done, total, text)``."""


def ignore_progress(done: int, total: int, text: str) -> None:
    """Do nothing: the default ``on_progress``."""
