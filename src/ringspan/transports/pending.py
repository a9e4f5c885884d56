"""Exchanges that have been posted to a backend and not yet waited for."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor

from ringspan.transports.calls import ExchangeRecord
from ringspan.transports.requests import PostExchange


class PendingExchange(NamedTuple):
    """A posted exchange.

    ``works`` has pairs of (peers, work handle of the backend). ``staged`` has pairs of (receive buffer on a GPU, host
    tensor into which the backend receives).
    """

    request: PostExchange
    works: list[tuple[list[int], Any]]
    staged: list[tuple[Tensor, Tensor]]
    record: ExchangeRecord | None

    def end(self) -> None:
        """Wait for all messages of an exchange that has failed. Its connections are closed, so that they fail at once.

        gloo keeps the connections and the thread of a group as long as it has a message that nobody has waited for.
        """
        for _, work in self.works:
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
