"""A transport that runs all ranks in one process, for tests, debugging and a single device.

It uses neither torch.distributed nor threads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ringspan.errors import TransportError
from ringspan.transports.calls import CallDescription
from ringspan.transports.requests import PostExchange, RankGenerator, Traffic, WaitExchange

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class InProcessExchange:
    """A posted exchange of one rank, and how many of its sends and receives are not yet matched by a peer."""

    rank: int
    label: str
    unmatched: int


class InProcessTransport:
    """Runs the generators of the ranks in turn. A message is copied as soon as both its send and its receive are
    posted."""

    def __init__(self, world: int) -> None:
        self.traffic = [Traffic() for _ in range(world)]

    def run(self, generators: Sequence[RankGenerator[T]], description: CallDescription | None = None) -> list[T]:
        """Run one generator per rank to the end and return their results in rank order."""
        if len(generators) != len(self.traffic):
            raise TransportError(f"this world has {len(self.traffic)} ranks, but {len(generators)} generators were given")
        results: dict[int, T] = {}
        # Messages that are posted and not yet matched, by (sender, receiver).
        sends: dict[tuple[int, int], deque[tuple[Tensor, InProcessExchange]]] = defaultdict(deque)
        recvs: dict[tuple[int, int], deque[tuple[Tensor, InProcessExchange]]] = defaultdict(deque)
        # The exchange that each unfinished rank waits for; None before the rank has started.
        waiting: dict[int, InProcessExchange | None] = dict.fromkeys(range(len(generators)))

        def post(rank: int, request: PostExchange) -> InProcessExchange:
            exchange = InProcessExchange(rank, request.label, len(request.sends) + len(request.recvs))
            for peer, tensor in request.sends:
                sends[rank, peer].append((tensor, exchange))
            for peer, tensor in request.recvs:
                recvs[peer, rank].append((tensor, exchange))
            for pair in {(rank, peer) for peer, _ in request.sends} | {(peer, rank) for peer, _ in request.recvs}:
                while sends[pair] and recvs[pair]:
                    self._deliver(*sends[pair].popleft(), *recvs[pair].popleft())
            return exchange

        while waiting:
            ready = [rank for rank, exchange in waiting.items() if exchange is None or exchange.unmatched == 0]
            if not ready:
                stuck = ", ".join(f"rank {exchange.rank} in {exchange.label}" for exchange in waiting.values() if exchange)
                raise TransportError(f"deadlock: {stuck} wait for messages that no rank has posted")
            for rank in ready:
                handle: Any = None
                try:
                    while True:
                        request = generators[rank].send(handle)
                        if isinstance(request, WaitExchange):
                            break
                        handle = post(rank, request)
                    waiting[rank] = request.pending
                except StopIteration as end:
                    results[rank] = end.value
                    del waiting[rank]
        return [results[rank] for rank in range(len(generators))]

    def _deliver(self, message: Tensor, sender: InProcessExchange, buffer: Tensor, receiver: InProcessExchange) -> None:
        if (message.shape, message.dtype) != (buffer.shape, buffer.dtype):
            raise TransportError(
                f"rank {sender.rank} sent {message.dtype} {tuple(message.shape)} in {sender.label} where rank {receiver.rank} "
                f"expected {buffer.dtype} {tuple(buffer.shape)} in {receiver.label}"
            )
        buffer.copy_(message)
        self.traffic[sender.rank].sent += message.nbytes
        self.traffic[receiver.rank].received += message.nbytes
        sender.unmatched -= 1
        receiver.unmatched -= 1
