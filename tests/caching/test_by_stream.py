"""What one stream has made no other one is given; a CUDA graph is given what any has made, for good."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from ringspan.caching import by_stream as streams
from ringspan.caching.by_stream import per_stream
from ringspan.errors import KernelError

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@per_stream(2)
def ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count)


class Here:
    """Where the host is: on which stream, and whether a graph is being captured there."""

    stream, capturing = (0, 1), False


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    place = Here()
    monkeypatch.setattr(streams, "_stream", lambda device: streams.CAPTURING if place.capturing else place.stream)
    ones.cache_clear()  # type: ignore[attr-defined]
    return place


def test_it_is_made_once_for_each_stream(here: Here) -> None:
    first = ones(3, GPU)
    here.stream = (0, 2)
    other = ones(3, GPU)
    here.stream = (0, 1)
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
    here.stream, here.capturing = (0, 2), True
    assert ones(3, GPU) is made
    here.capturing = False
    for count in range(4, 9):
        ones(count, GPU)  # long forgotten, but for graphs
    assert ones(3, GPU) is not made
    here.capturing = True
    assert ones(3, GPU) is made


def test_nothing_is_made_in_a_graph(here: Here) -> None:
    here.capturing = True
    with pytest.raises(KernelError, match="run the same step once, just before it is captured"):
        ones(11, GPU)
    with pytest.raises(KernelError, match="this kernel makes a mask anew in every call"):
        streams.on_device(np.arange(3), GPU)


def test_nor_where_somebody_looks(here: Here) -> None:
    here.capturing = True
    with FakeTensorMode(), pytest.raises(KernelError, match="run the same step once"):
        ones(11, GPU)


def test_what_is_made_where_somebody_looks_is_not_kept(here: Here) -> None:
    with FakeTensorMode():
        likeness = ones(5, GPU)
    assert isinstance(likeness, FakeTensor)
    assert not isinstance(ones(5, GPU), FakeTensor)


def test_numbers_of_the_host_come_from_the_host() -> None:
    with torch.device("meta"):
        assert streams.on_device(np.arange(3), CPU).tolist() == [0, 1, 2]


def test_on_a_cpu_there_is_one() -> None:
    assert ones(3, CPU) is ones(3, CPU)
    assert ones(3, CPU) is not ones(4, CPU)
