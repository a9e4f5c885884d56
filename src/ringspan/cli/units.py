"""Seconds and bytes in units that are easy to read."""

from __future__ import annotations


def seconds(value: float) -> str:
    """
    >>> seconds(1.574), seconds(0.0337), seconds(4.2e-5), seconds(0)
    ('1.57 s', '33.7 ms', '42 µs', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{_short(value / size)} {unit}"
    return "0 s" if value == 0 else f"{value / 1e-6:.2g} µs"


def size(value: float) -> str:
    """
    >>> size(3 * 2**30), size(1536), size(12)
    ('3 GiB', '1.5 KiB', '12 B')
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 2**power:
            return f"{_short(value / 2**power)} {unit}"
    return f"{value:.0f} B"


def _short(value: float) -> str:
    """Write three digits, and never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
