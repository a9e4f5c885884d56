"""Types of command-line arguments, for ``type=`` of argparse."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

UNITS = {"": 1, "k": 2**10, "m": 2**20}


def tokens(text: str) -> int:
    """Return a number of tokens: an integer, or one with K (1,024) or M (1,048,576).

    >>> tokens("4096"), tokens("128K"), tokens("1M"), tokens("1_048_576")
    (4096, 131072, 1048576, 1048576)
    """
    match = re.fullmatch(r"(\d[\d_,]*)([km]?)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens: write 131072, 128K or 1M")
    return int(match[1].replace(",", "").replace("_", "")) * UNITS[match[2]]


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
