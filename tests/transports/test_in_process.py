"""The in-process transport, with walks written by hand."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from ringspan.errors import TransportError
from ringspan.transports import InProcessTransport, PostExchange, WaitExchange


def swap(peer: int, mine: float, rounds: int = 1) -> Generator[Any, Any, list[float]]:
    """Send a number to the peer and receive one, so many times."""
    got = []
    for n in range(rounds):
        buffer = torch.empty(1)
        ticket = yield PostExchange(f"round {n}", ((peer, torch.tensor([mine + n])),), ((peer, buffer),))
        yield WaitExchange(ticket)
        got.append(buffer.item())
    return got


def test_ranks_take_turns_and_results_come_in_order() -> None:
    world = InProcessTransport(2)
    assert world.run([swap(1, 10.0, rounds=3), swap(0, 20.0, rounds=3)]) == [[20.0, 21.0, 22.0], [10.0, 11.0, 12.0]]
    assert [(t.sent, t.received) for t in world.traffic] == [(12, 12), (12, 12)]


def test_messages_between_two_ranks_keep_their_order() -> None:
    def sender() -> Generator[Any, Any, None]:
        tickets = []
        for value in (1.0, 2.0, 3.0):
            tickets.append((yield PostExchange(f"{value}", ((1, torch.tensor([value])),), ())))
        for ticket in tickets:
            yield WaitExchange(ticket)

    def receiver() -> Generator[Any, Any, list[float]]:
        buffers = [torch.empty(1) for _ in range(3)]
        ticket = yield PostExchange("all", (), tuple((0, b) for b in buffers))
        yield WaitExchange(ticket)
        return [b.item() for b in buffers]

    assert InProcessTransport(2).run([sender(), receiver()])[1] == [1.0, 2.0, 3.0]


def test_a_sender_may_not_reuse_its_buffer_before_the_message_was_taken() -> None:
    """The sender's wait ends only when the receiver has the bytes, however late the receiver is."""

    def sender() -> Generator[Any, Any, None]:
        message = torch.tensor([7.0])
        ticket = yield PostExchange("send", ((1, message),), ())
        yield WaitExchange(ticket)
        message.fill_(-1.0)

    def late_receiver() -> Generator[Any, Any, float]:
        for n in range(3):
            yield WaitExchange((yield PostExchange(f"idle {n}", (), ())))
        buffer = torch.empty(1)
        yield WaitExchange((yield PostExchange("receive", (), ((0, buffer),))))
        return buffer.item()

    assert InProcessTransport(2).run([sender(), late_receiver()])[1] == 7.0


def only_receives(peer: int, buffer: Tensor) -> Generator[Any, Any, None]:
    yield WaitExchange((yield PostExchange("forward step 3", (), ((peer, buffer),))))


@pytest.mark.parametrize(
    ("walks", "message"),
    [
        (lambda: [only_receives(1, torch.empty(1)), only_receives(0, torch.empty(1))], "rank 0 in forward step 3, rank 1"),
        (lambda: [swap(1, 1.0), only_receives(0, torch.empty(2))], r"rank 0 sent .*\(1,\).*rank 1 expected .*\(2,\)"),
        (lambda: [swap(1, 1.0), only_receives(0, torch.empty(1, dtype=torch.float64))], "float32.*float64"),
        (lambda: [swap(1, 1.0)], "2 ranks, but 1"),
    ],
    ids=["nobody sends", "other size", "other dtype", "other number of ranks"],
)
def test_what_does_not_fit_is_named(walks: Any, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        InProcessTransport(2).run(walks())
