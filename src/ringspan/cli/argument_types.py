"""Types of command-line arguments, for ``type=`` of argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return a ``type=`` for argparse.

    >>> at_least(1)("3")
    3
    """

    def number(text: str) -> int:
        n = int(text)
        if n < least:
            raise argparse.ArgumentTypeError(f"{n} is too small: at least {least}")
        return n

    number.__name__ = "integer"  # argparse names it in its own errors
    return number
