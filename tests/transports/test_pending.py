"""Exchanges that have failed."""

from __future__ import annotations

from datetime import timedelta

from ringspan.transports.pending import PendingExchange
from ringspan.transports.requests import PostExchange


class FailingWork:
    """A message whose connection is closed."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, timeout: timedelta) -> None:
        self.waits += 1
        raise RuntimeError("Connection closed by peer")


def test_every_message_of_a_failed_exchange_is_waited_for() -> None:
    works = [FailingWork() for _ in range(3)]
    request = PostExchange("forward step 0", (), ())
    PendingExchange(request, [([n], work) for n, work in enumerate(works)], [], None).end()
    assert [work.waits for work in works] == [1, 1, 1]
