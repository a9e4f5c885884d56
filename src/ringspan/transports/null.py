"""A transport that moves nothing: for timing one rank's compute without its communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ringspan.transports.requests import RankCoroutine, Traffic

T = TypeVar("T")


class NullTransport:
    """Completes every exchange at once. Receive buffers stay uninitialised: results have no meaning, only a cost."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def run(self, coroutines: Sequence[RankCoroutine[T]]) -> list[T]:
        """Run each coroutine to its end and return their results."""
        results = []
        for coroutine in coroutines:
            try:
                while True:
                    coroutine.send(None)
            except StopIteration as end:
                results.append(end.value)
        return results
