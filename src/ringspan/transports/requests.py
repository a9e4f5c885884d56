"""What the engine asks of a transport. The engine yields these; it never moves a byte itself."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Post:
    """Begin an exchange: tensors to send to peers, and contiguous tensors to be filled by them. Answered with a ticket.

    Between two ranks messages arrive in the order in which they were sent. Neither side may touch the tensors until the
    ticket has been waited for.
    """

    label: str
    sends: tuple[tuple[int, Tensor], ...]
    recvs: tuple[tuple[int, Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """End the exchange of this ticket: everything has been sent and has arrived."""

    ticket: Any


# One rank's walk through its plan: yields requests, is resumed with tickets, returns its result.
Walk: TypeAlias = Generator["Post | Wait", Any, T]


@dataclass(slots=True)
class Traffic:
    """Bytes that really moved, counted where they are moved."""

    sent: int = 0
    received: int = 0
