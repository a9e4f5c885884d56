"""What one stream has made no other one is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringspan.per_stream import per_stream


@per_stream(2)
def ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count)


def test_it_is_made_once_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter("ABA")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    first, other, again = (ones(3, torch.device("cuda")) for _ in range(3))
    assert again is first
    assert other is not first


def test_on_a_cpu_there_is_one() -> None:
    assert ones(3, torch.device("cpu")) is ones(3, torch.device("cpu"))
    assert ones(3, torch.device("cpu")) is not ones(4, torch.device("cpu"))
