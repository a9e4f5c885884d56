"""Every error ringspan raises on purpose. Each says what was expected, what came, and what to do."""

from __future__ import annotations


class RingspanError(Exception):
    """The base of all of them: ``except RingspanError`` catches nothing that is not ours."""


class MaskError(RingspanError, ValueError):
    """A mask that cannot be: a negative length, two lengths that differ, a mask used as a truth value."""


class LayoutError(RingspanError, ValueError):
    """Spans that are not a bijection from the tokens, or a layout made for another length or world."""


class PlanError(RingspanError, ValueError):
    """A plan that does not hold: an unknown strategy, a malformed file, a failed ``verify()``."""


class InputError(RingspanError, ValueError):
    """Tensors that are not what the plan was made for."""


class UnplannedAttention(RingspanError, RuntimeError):
    """An attention call, inside a ``with cp:`` block, that the plan cannot make exact."""


class KernelError(RingspanError, RuntimeError):
    """No kernel can serve these tensors, or the one that was asked for cannot."""


class UnknownKernel(KernelError, ValueError):
    """A name that no kernel has."""


class TransportError(RingspanError, RuntimeError):
    """Something went wrong between ranks."""


class PeerMismatch(TransportError):
    """The ranks of a group came with different plans, shapes or dtypes. Raised on every rank alike."""


class PeerLost(TransportError):
    """A rank of the group went away in the middle of an exchange."""


class PeerTimeout(TransportError):
    """A rank of the group did not answer in time."""
