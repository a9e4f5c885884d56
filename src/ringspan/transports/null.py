"""A transport that moves nothing, to time the compute of one rank without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from ringspan.transports.calls import CallDescription
from ringspan.transports.requests import PostExchange, RankGenerator, Traffic

T = TypeVar("T")


class NullTransport:
    """Completes every exchange at once, so results have no meaning.

    Receive buffers are passed to ``fill``, if it is given. Otherwise they stay uninitialised on GPUs. On CPUs they become
    zeros: kernels there take longer for NaN and for denormal numbers.
    """

    def __init__(self, *, fill: Callable[[Tensor], None] | None = None) -> None:
        self.traffic = Traffic()
        self._fill = fill

    def run(self, generators: Sequence[RankGenerator[T]], description: CallDescription | None = None) -> list[T]:
        """Run each generator to its end and return their results."""
        results = []
        for generator in generators:
            try:
                while True:
                    request = generator.send(None)
                    for _, buffer in request.recvs if isinstance(request, PostExchange) else ():
                        if self._fill is not None:
                            self._fill(buffer)
                        elif buffer.device.type == "cpu":
                            buffer.zero_()
            except StopIteration as end:
                results.append(end.value)
        return results
