"""Test drivers for the generators of ranks. They meet the contract of PostExchange and WaitExchange in its least helpful way.

Each rank goes on alone until it can go no further. What is to be received is filled with NaN when it is posted, and is right
only once it has been waited for. The two are the extremes of when a message is read: at once, so that a rank can be steps
ahead of the others, or at the very last moment, when all wait for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringspan.transports import PostExchange, RankGenerator, WaitExchange

Messages = dict[tuple[int, int], deque[Tensor]]


def go_on(walk: RankGenerator[Any], post: Callable[[PostExchange], Any], answer: Any = None) -> tuple[Any, bool]:
    """Until the walk waits (with its ticket) or ends (with its result, and True)."""
    try:
        while isinstance(request := walk.send(answer), PostExchange):
            for _, tensor in (*request.sends, *request.recvs):
                assert tensor.is_contiguous()
            for _, tensor in request.recvs:
                tensor.fill_(torch.nan)
            answer = post(request)
        assert isinstance(request, WaitExchange)
        return request.pending, False
    except StopIteration as end:
        return end.value, True


class FarAhead:
    """Messages are read when they are posted. The first rank of ``order`` that can go on does, as far as it can."""

    def __init__(self, order: int = 1) -> None:
        self.order = order
        self.furthest_apart = 0

    def run(self, walks: Sequence[RankGenerator[Any]]) -> list[Any]:
        mail: Messages = defaultdict(deque)
        results: dict[int, Any] = {}
        waiting: dict[int, PostExchange | None] = dict.fromkeys(range(len(walks))[:: self.order])
        steps = [0] * len(walks)

        def has_all(rank: int, ticket: PostExchange | None) -> bool:
            peers = [peer for peer, _ in ticket.recvs] if ticket else []
            return all(len(mail[peer, rank]) >= peers.count(peer) for peer in peers)

        def post(rank: int, request: PostExchange) -> PostExchange:
            steps[rank] += 1
            self.furthest_apart = max(self.furthest_apart, max(steps) - min(steps))
            for peer, tensor in request.sends:
                mail[rank, peer].append(tensor.clone())
            return request

        while waiting:
            able = [rank for rank, ticket in waiting.items() if has_all(rank, ticket)]
            assert able, "nobody can go on"
            rank, ticket = able[0], waiting[able[0]]
            for peer, tensor in ticket.recvs if ticket else ():
                tensor.copy_(mail[peer, rank].popleft())
            waiting[rank], ended = go_on(walks[rank], lambda request, rank=rank: post(rank, request))  # type: ignore[misc]
            if ended:
                results[rank] = waiting.pop(rank)
        assert not any(mail.values())
        return [results[rank] for rank in range(len(walks))]


class AtTheLastMoment:
    """Messages are read when everybody waits: then those of the earliest step arrive."""

    def run(self, walks: Sequence[RankGenerator[Any]]) -> list[Any]:
        results: dict[int, Any] = {}
        waiting: dict[int, PostExchange] = {}
        able = list(range(len(walks)))
        while able:
            for rank in able:
                outcome, ended = go_on(walks[rank], lambda request: request)
                (results if ended else waiting)[rank] = outcome
            earliest = min((_step(ticket) for ticket in waiting.values()), default=None)
            able = [rank for rank, ticket in waiting.items() if _step(ticket) == earliest]
            self._deliver({rank: waiting.pop(rank) for rank in able})
        return [results[rank] for rank in range(len(walks))]

    def _deliver(self, tickets: dict[int, PostExchange]) -> None:
        sent: Messages = defaultdict(deque)
        for rank, ticket in tickets.items():
            for peer, tensor in ticket.sends:
                sent[rank, peer].append(tensor)
        for rank, ticket in tickets.items():
            for peer, tensor in ticket.recvs:
                tensor.copy_(sent[peer, rank].popleft())
        assert not any(sent.values())


def _step(ticket: PostExchange) -> int:
    return int(ticket.label.split()[-1])
