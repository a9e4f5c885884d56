"""What one stream has made no other one is given; a CUDA graph is given what any has made, for good."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringspan import per_stream as streams
from ringspan.errors import KernelError
from ringspan.per_stream import per_stream

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@per_stream(2)
def ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count)


class Here:
    """Where the host is: on which stream, and whether a graph is being captured there."""

    stream, capturing = 1, False


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    place = Here()
    monkeypatch.setattr(streams, "_stream", lambda device: place.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: place.capturing)
    ones.cache_clear()  # type: ignore[attr-defined]
    return place


def test_it_is_made_once_for_each_stream(here: Here) -> None:
    first = ones(3, GPU)
    here.stream = 2
    other = ones(3, GPU)
    here.stream = 1
    assert ones(3, GPU) is first
    assert other is not first


def test_what_was_not_used_for_longest_goes_first(here: Here) -> None:
    one, two = ones(1, GPU), ones(2, GPU)
    assert ones(1, GPU) is one
    ones(3, GPU)
    assert ones(1, GPU) is one
    assert ones(2, GPU) is not two


def test_a_graph_is_given_what_another_stream_has_made_and_keeps_it(here: Here) -> None:
    made = ones(3, GPU)
    here.stream, here.capturing = 2, True
    assert ones(3, GPU) is made
    here.capturing = False
    for count in range(4, 9):
        ones(count, GPU)  # long forgotten, but for graphs
    here.capturing = True
    assert ones(3, GPU) is made


def test_nothing_is_made_in_a_graph(here: Here) -> None:
    here.capturing = True
    with pytest.raises(KernelError, match="run the same step once, then capture it"):
        ones(11, GPU)


def test_on_a_cpu_there_is_one() -> None:
    assert ones(3, CPU) is ones(3, CPU)
    assert ones(3, CPU) is not ones(4, CPU)
