"""All ranks in this process: for debugging, tests and a single device. No torch.distributed, no threads."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ringspan.errors import TransportError
from ringspan.transports.requests import Post, Traffic, Wait, Walk

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Ticket:
    rank: int
    label: str
    open: int  # messages that have not met their other side


class InProcess:
    """Takes turns between the ranks' walks. A message is copied as soon as both sides have posted it."""

    def __init__(self, world: int) -> None:
        self.traffic = [Traffic() for _ in range(world)]

    def run(self, walks: Sequence[Walk[T]]) -> list[T]:
        """Walk all ranks to the end; their results in order."""
        if len(walks) != len(self.traffic):
            raise TransportError(f"this world has {len(self.traffic)} ranks, but {len(walks)} walks were given")
        results: dict[int, T] = {}
        sent: dict[tuple[int, int], deque[tuple[Tensor, _Ticket]]] = defaultdict(deque)
        wanted: dict[tuple[int, int], deque[tuple[Tensor, _Ticket]]] = defaultdict(deque)
        waiting: dict[int, _Ticket | None] = dict.fromkeys(range(len(walks)))

        def post(rank: int, request: Post) -> _Ticket:
            ticket = _Ticket(rank, request.label, len(request.sends) + len(request.recvs))
            for peer, tensor in request.sends:
                sent[rank, peer].append((tensor, ticket))
            for peer, tensor in request.recvs:
                wanted[peer, rank].append((tensor, ticket))
            for pair in {(rank, peer) for peer, _ in request.sends} | {(peer, rank) for peer, _ in request.recvs}:
                while sent[pair] and wanted[pair]:
                    self._deliver(*sent[pair].popleft(), *wanted[pair].popleft())
            return ticket

        while waiting:
            ready = [rank for rank, ticket in waiting.items() if ticket is None or ticket.open == 0]
            if not ready:
                stuck = ", ".join(f"rank {t.rank} in {t.label}" for t in waiting.values() if t)
                raise TransportError(f"nobody can go on: {stuck} wait for messages that nobody sends")
            for rank in ready:
                answer: Any = None
                try:
                    while True:
                        request = walks[rank].send(answer)
                        if isinstance(request, Wait):
                            break
                        answer = post(rank, request)
                    waiting[rank] = request.ticket
                except StopIteration as end:
                    results[rank] = end.value
                    del waiting[rank]
        return [results[rank] for rank in range(len(walks))]

    def _deliver(self, message: Tensor, sender: _Ticket, buffer: Tensor, receiver: _Ticket) -> None:
        if (message.shape, message.dtype) != (buffer.shape, buffer.dtype):
            raise TransportError(
                f"rank {sender.rank} sent {message.dtype} {tuple(message.shape)} in {sender.label} where rank {receiver.rank} "
                f"expected {buffer.dtype} {tuple(buffer.shape)} in {receiver.label}"
            )
        buffer.copy_(message)
        self.traffic[sender.rank].sent += message.nbytes
        self.traffic[receiver.rank].received += message.nbytes
        sender.open -= 1
        receiver.open -= 1
