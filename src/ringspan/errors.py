"""The errors that ringspan raises. Each message says what was expected, what was given, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class RingspanError(Exception):
    """The base class of all errors of ringspan."""


class MaskError(RingspanError, ValueError):
    """An invalid mask: a negative length, two lengths that differ, a mask used as a truth value."""


class LayoutError(RingspanError, ValueError):
    """An invalid layout: spans that do not own every token exactly once, or a layout for another length or world."""


class PlanError(RingspanError, ValueError):
    """An invalid plan: an unknown strategy, a malformed file, a failed ``verify()``."""


class InputError(RingspanError, ValueError):
    """Arguments or tensors that are invalid, or not those that the plan was made for."""


class UnplannedAttention(RingspanError, RuntimeError):
    """An attention call, inside a ``with cp:`` block, that the plan cannot make exact."""


class ParityError(RingspanError, AssertionError):
    """A model over several ranks differs from one process: raised by ``check_parity(..., check=True)``."""


class KernelError(RingspanError, RuntimeError):
    """No kernel supports these tensors, or the requested kernel does not."""


class UnknownKernel(KernelError, ValueError):
    """The name of a kernel that does not exist."""


class TransportError(RingspanError, RuntimeError):
    """Communication failed. The subclasses name the cause, if it is a peer."""


class PeerMismatch(TransportError):
    """The ranks of a group make different calls, or calls with other plans, shapes or dtypes. Every rank raises it."""


class PeerFailed(TransportError):
    """Another rank of the group raised an error in this call. The message has the rank and its error."""


class PeerLost(TransportError):
    """The connection to a rank of the group was lost: its process has died or was disconnected."""


class PeerTimeout(TransportError):
    """A message from a rank of the group did not arrive within the time limit."""


def unknown_name(kind: str, name: object, known: Sequence[str]) -> str:
    """Return the error message for an unknown name, with the most similar known one.

    >>> unknown_name("mask", "casual", ["full", "causal", "window"])
    "no mask is called 'casual' (did you mean causal?); there are full, causal and window"
    >>> unknown_name("mask", 3, ["full", "causal"])
    'no mask is called 3; there are full and causal'
    >>> unknown_name("kernel", "FA4", ["fa4"])
    "no kernel is called 'FA4' (did you mean fa4?); there is fa4"
    """
    by_lower = {x.lower(): x for x in known}
    near = get_close_matches(str(name).lower(), by_lower, n=1)
    guess = f" (did you mean {by_lower[near[0]]}?)" if near else ""
    there = f"are {', '.join(known[:-1])} and {known[-1]}" if len(known) > 1 else f"is {known[0]}"
    return f"no {kind} is called {name!r}{guess}; there {there}"
