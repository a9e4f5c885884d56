"""The requests that the generator of a rank yields to its transport.

The engine yields a :class:`PostExchange` to start sends and receives and a :class:`WaitExchange` to complete them. The
transport carries them out; the engine itself never communicates.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class PostExchange:
    """Start these sends and receives without blocking. The transport sends back a handle for :class:`WaitExchange`.

    ``sends`` and ``recvs`` have pairs of (peer rank, tensor). Receive buffers are contiguous. Messages between two
    ranks arrive in the order in which they were sent. Neither the sent tensors nor the receive buffers may be touched
    before the exchange has been waited for. ``label`` names the step in error messages
    and is part of the tags, so it must be equal on all ranks.
    """

    label: str
    sends: tuple[tuple[int, Tensor], ...]
    recvs: tuple[tuple[int, Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class WaitExchange:
    """Wait until every send and receive of an exchange is complete. ``pending`` is the handle of its PostExchange."""

    pending: Any


# One rank's execution of its plan: a generator that yields requests, is resumed with handles, and returns its result.
RankGenerator: TypeAlias = Generator["PostExchange | WaitExchange", Any, T]


@dataclass(slots=True)
class Traffic:
    """Bytes that a transport has moved for one rank, in the exchanges of plans. Collectives are not counted."""

    sent: int = 0
    received: int = 0
