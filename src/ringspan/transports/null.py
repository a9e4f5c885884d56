"""A transport that moves nothing, to time the compute of one rank without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ringspan.transports.calls import CallDescription
from ringspan.transports.requests import RankGenerator, Traffic

T = TypeVar("T")


class NullTransport:
    """Completes every exchange at once. Receive buffers stay uninitialised, so results have no meaning."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def run(self, generators: Sequence[RankGenerator[T]], description: CallDescription | None = None) -> list[T]:
        """Run each generator to its end and return their results."""
        results = []
        for generator in generators:
            try:
                while True:
                    generator.send(None)
            except StopIteration as end:
                results.append(end.value)
        return results
