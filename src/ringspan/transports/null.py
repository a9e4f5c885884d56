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
    denormal numbers. They are added to the list ``received``, if one is given: a CUDA graph can then be timed with
    other numbers than the zeros that its memory often has, with which a GPU computes faster.
    """

    def __init__(self, *, received: list[Tensor] | None = None) -> None:
        self.traffic = Traffic()
        self._received = received

    def run(self, generators: Sequence[RankGenerator[T]], description: CallDescription | None = None) -> list[T]:
        """Run each generator to its end and return their results."""
        results = []
        for generator in generators:
            try:
                while True:
                    request = generator.send(None)
                    for _, buffer in request.recvs if isinstance(request, PostExchange) else ():
                        if buffer.device.type == "cpu":
                            buffer.zero_()
                        if self._received is not None:
                            self._received.append(buffer)
            except StopIteration as end:
                results.append(end.value)
        return results
