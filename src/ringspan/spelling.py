"""What to say of a name that nobody has: which names there are, and which of them was probably meant."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def no_such(kind: str, name: object, known: Sequence[str]) -> str:
    """
    >>> no_such("mask", "casual", ["full", "causal", "window"])
    "no mask is called 'casual' (did you mean causal?); there are full, causal and window"
    >>> no_such("mask", 3, ["full", "causal"])
    'no mask is called 3; there are full and causal'
    >>> no_such("kernel", "FA4", ["fa4"])
    "no kernel is called 'FA4' (did you mean fa4?); there is fa4"
    """
    by_lower = {x.lower(): x for x in known}
    near = get_close_matches(str(name).lower(), by_lower, n=1)
    guess = f" (did you mean {by_lower[near[0]]}?)" if near else ""
    there = f"are {', '.join(known[:-1])} and {known[-1]}" if len(known) > 1 else f"is {known[0]}"
    return f"no {kind} is called {name!r}{guess}; there {there}"
