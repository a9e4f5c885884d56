"""A transport that moves nothing, to time the compute of one rank without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from ringspan.transports.calls import CallDescription
from ringspan.transports.requests import PostExchange, RankGenerator, Traffic

T = TypeVar("T")


class NullTransport:
    """Completes every exchange at once, so results have no meaning.

    Receive buffers stay uninitialised on GPUs. On CPUs they become zeros: kernels there take longer for NaN and for
    denormal numbers. With ``keep`` they are added to that list, so that they can be filled before a CUDA graph is timed:
    its memory is often all zeros, with which a GPU computes faster than with other numbers.
    """

    def __init__(self, *, keep: list[Tensor] | None = None) -> None:
        self.traffic = Traffic()
        self._keep = keep

    def run(self, generators: Sequence[RankGenerator[T]], description: CallDescription | None = None) -> list[T]:
        """Run each generator to its end and return their results."""
        results = []
        for generator in generators:
            try:
                while True:
                    request = generator.send(None)
                    for _, received in request.recvs if isinstance(request, PostExchange) else ():
                        if received.device.type == "cpu":
                            received.zero_()
                        if self._keep is not None:
                            self._keep.append(received)
            except StopIteration as end:
                results.append(end.value)
        return results
