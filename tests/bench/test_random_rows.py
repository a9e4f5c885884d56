"""Receive buffers of a benchmark: random numbers, and copies of the same bytes alone."""

from __future__ import annotations

import torch

from ringspan.bench.random_rows import RandomRows
from ringspan.transports.null import NullTransport
from ringspan.transports.requests import PostExchange


def test_receive_buffers_are_filled_with_random_numbers() -> None:
    fill, buffers = RandomRows(), [torch.zeros(4, 1, 2, 8), torch.zeros(2, 1, 2, 8), torch.zeros(3, dtype=torch.bfloat16)]

    def rank():  # type: ignore[no-untyped-def]
        yield PostExchange("forward step 0", (), tuple((1, x) for x in buffers))
        return "done"

    assert NullTransport(fill=fill).run([rank()]) == ["done"]
    for x in buffers:
        assert (x != 0).all()
        assert x.isfinite().all()


def test_the_copies_alone_have_the_bytes_of_a_step() -> None:
    fill, buffers, copied = RandomRows(), [torch.zeros(4, 8), torch.zeros(2, 8)], []
    alone = fill.alone(lambda: [fill(x) for x in buffers])
    original = torch.Tensor.copy_
    with torch.no_grad():
        try:
            torch.Tensor.copy_ = lambda x, y: copied.append(x.numel()) or original(x, y)  # type: ignore[assignment, method-assign]
            alone()
        finally:
            torch.Tensor.copy_ = original  # type: ignore[method-assign]
    assert copied == [32, 16]
