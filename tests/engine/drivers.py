"""Drivers that run the generators of all ranks in the orders that PostExchange and WaitExchange barely allow.

A driver resumes one rank until it has to wait for a message, then another. It fills a receive buffer with NaN when the
exchange is posted, so that a read before the wait fails the test. The two drivers are the extremes of when a message is
delivered: as soon as it is posted, so that a rank can be several steps ahead of the others, or only when all ranks
wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringspan.transports import PostExchange, RankGenerator, WaitExchange

Messages = dict[tuple[int, int], deque[Tensor]]


def resume(generator: RankGenerator[Any], post: Callable[[PostExchange], Any], answer: Any = None) -> tuple[Any, bool]:
    """Run a generator until it waits or ends. Return (pending exchange, False) or (result, True)."""
    try:
        while isinstance(request := generator.send(answer), PostExchange):
            for _, tensor in (*request.sends, *request.recvs):
                assert tensor.is_contiguous()
            for _, tensor in request.recvs:
                tensor.fill_(torch.nan)
            answer = post(request)
        assert isinstance(request, WaitExchange)
        return request.pending, False
    except StopIteration as end:
        return end.value, True


class DeliverAtOnce:
    """Delivers messages when they are posted.

    Resumes the first rank in ``order`` that has all messages it waits for.
    """

    def __init__(self, order: int = 1) -> None:
        self.order = order
        self.furthest_apart = 0

    def run(self, generators: Sequence[RankGenerator[Any]], description: object = None) -> list[Any]:
        queues: Messages = defaultdict(deque)
        results: dict[int, Any] = {}
        waiting: dict[int, PostExchange | None] = dict.fromkeys(range(len(generators))[:: self.order])
        steps = [0] * len(generators)

        def has_all(rank: int, exchange: PostExchange | None) -> bool:
            peers = [peer for peer, _ in exchange.recvs] if exchange else []
            return all(len(queues[peer, rank]) >= peers.count(peer) for peer in peers)

        def post(rank: int, request: PostExchange) -> PostExchange:
            steps[rank] += 1
            self.furthest_apart = max(self.furthest_apart, max(steps) - min(steps))
            for peer, tensor in request.sends:
                queues[rank, peer].append(tensor.clone())
            return request

        while waiting:
            ready = [rank for rank, exchange in waiting.items() if has_all(rank, exchange)]
            assert ready, "deadlock: every rank waits for a message"
            rank, exchange = ready[0], waiting[ready[0]]
            for peer, tensor in exchange.recvs if exchange else ():
                tensor.copy_(queues[peer, rank].popleft())
            waiting[rank], ended = resume(generators[rank], lambda request, rank=rank: post(rank, request))  # type: ignore[misc]
            if ended:
                results[rank] = waiting.pop(rank)
        assert not any(queues.values())
        return [results[rank] for rank in range(len(generators))]


class DeliverLate:
    """Delivers messages only when all ranks wait, and then only those of the earliest step."""

    def run(self, generators: Sequence[RankGenerator[Any]], description: object = None) -> list[Any]:
        results: dict[int, Any] = {}
        waiting: dict[int, PostExchange] = {}
        ready = list(range(len(generators)))
        while ready:
            for rank in ready:
                outcome, ended = resume(generators[rank], lambda request: request)
                (results if ended else waiting)[rank] = outcome
            earliest = min((_step(exchange) for exchange in waiting.values()), default=None)
            ready = [rank for rank, exchange in waiting.items() if _step(exchange) == earliest]
            self._deliver({rank: waiting.pop(rank) for rank in ready})
        return [results[rank] for rank in range(len(generators))]

    def _deliver(self, exchanges: dict[int, PostExchange]) -> None:
        sent: Messages = defaultdict(deque)
        for rank, exchange in exchanges.items():
            for peer, tensor in exchange.sends:
                sent[rank, peer].append(tensor)
        for rank, exchange in exchanges.items():
            for peer, tensor in exchange.recvs:
                tensor.copy_(sent[peer, rank].popleft())
        assert not any(sent.values())


def _step(exchange: PostExchange) -> int:
    return int(exchange.label.split()[-1])
