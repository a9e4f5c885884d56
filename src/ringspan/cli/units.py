"""Seconds and bytes in units that are easy to read."""

from __future__ import annotations


def seconds(value: float) -> str:
    """
    >>> seconds(1.574), seconds(0.0337), seconds(4.2e-5), seconds(0)
    ('1.57 s', '33.7 ms', '42 µs', '0 s')
    """
    unit, size = time_unit(value)
    if value < size:
        return "0 s" if value == 0 else f"{value / size:.2g} {unit}"
    return f"{_short(value / size)} {unit}"


def time_unit(value: float) -> tuple[str, float]:
    """Return the unit in which :func:`seconds` writes a value, and how many seconds it is.

    >>> time_unit(0.0337), time_unit(4.2e-7)
    (('ms', 0.001), ('µs', 1e-06))
    """
    return next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if value >= size), ("µs", 1e-6))


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
