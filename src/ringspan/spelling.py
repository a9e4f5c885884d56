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
    """
    near = get_close_matches(str(name), known, n=1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    return f"no {kind} is called {name!r}{guess}; there are {', '.join(known[:-1])} and {known[-1]}"
