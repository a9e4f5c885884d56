"""The in-process transport, run with generators written by hand."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from ringspan.errors import TransportError
from ringspan.transports import InProcessTransport, PostExchange, WaitExchange


def swap(peer: int, mine: float, rounds: int = 1) -> Generator[Any, Any, list[float]]:
    """In each round, send one number to the peer and receive one."""
    got = []
    for n in range(rounds):
        buffer = torch.empty(1)
        exchange = yield PostExchange(f"round {n}", ((peer, torch.tensor([mine + n])),), ((peer, buffer),))
        yield WaitExchange(exchange)
        got.append(buffer.item())
    return got


def test_results_come_in_rank_order_and_bytes_are_counted() -> None:
    world = InProcessTransport(2)
    assert world.run([swap(1, 10.0, rounds=3), swap(0, 20.0, rounds=3)]) == [[20.0, 21.0, 22.0], [10.0, 11.0, 12.0]]
    assert [(t.sent, t.received) for t in world.traffic] == [(12, 12), (12, 12)]


def test_messages_between_two_ranks_keep_their_order() -> None:
    def sender() -> Generator[Any, Any, None]:
        pending = []
        for value in (1.0, 2.0, 3.0):
            pending.append((yield PostExchange(f"{value}", ((1, torch.tensor([value])),), ())))
        for exchange in pending:
            yield WaitExchange(exchange)

    def receiver() -> Generator[Any, Any, list[float]]:
        buffers = [torch.empty(1) for _ in range(3)]
        exchange = yield PostExchange("all", (), tuple((0, b) for b in buffers))
        yield WaitExchange(exchange)
        return [b.item() for b in buffers]

    assert InProcessTransport(2).run([sender(), receiver()])[1] == [1.0, 2.0, 3.0]


def test_a_send_completes_only_after_its_receive() -> None:
    """The receiver is three steps late. The sender overwrites its message right after its wait."""

    def sender() -> Generator[Any, Any, None]:
        message = torch.tensor([7.0])
        exchange = yield PostExchange("send", ((1, message),), ())
        yield WaitExchange(exchange)
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
    ("generators", "message"),
    [
        (lambda: [only_receives(1, torch.empty(1)), only_receives(0, torch.empty(1))], "rank 0 in forward step 3, rank 1"),
        (lambda: [swap(1, 1.0), only_receives(0, torch.empty(2))], r"rank 0 sent .*\(1,\).*rank 1 expected .*\(2,\)"),
        (lambda: [swap(1, 1.0), only_receives(0, torch.empty(1, dtype=torch.float64))], "float32.*float64"),
        (lambda: [swap(1, 1.0)], "2 ranks, but 1"),
    ],
    ids=["deadlock", "other size", "other dtype", "other number of ranks"],
)
def test_errors_name_ranks_and_steps(generators: Any, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        InProcessTransport(2).run(generators())
