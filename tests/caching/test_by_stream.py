"""The cache by stream: no tensor of one stream is handed to another, and CUDA graphs keep what they read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

import ringspan as rs
from ringspan.caching import by_stream as streams
from ringspan.caching.by_stream import cache_by_stream
from ringspan.engine import global_indices, slots
from ringspan.errors import KernelError
from ringspan.plans.slot_tokens import SlotTokens

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@cache_by_stream(2)
def ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count)


class FakeDevice:
    """The current stream of a GPU that is not there, and whether a CUDA graph is being captured on it."""

    stream, capturing = (0, 1), False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(streams, "stream_key", lambda device: streams.CAPTURING if fake.capturing else fake.stream)
    ones.cache_clear()  # type: ignore[attr-defined]
    return fake


def test_each_stream_makes_its_own(gpu: FakeDevice) -> None:
    first = ones(3, GPU)
    gpu.stream = (0, 2)
    other = ones(3, GPU)
    gpu.stream = (0, 1)
    assert ones(3, GPU) is first
    assert other is not first


def test_the_least_recently_used_entry_is_evicted_first(gpu: FakeDevice) -> None:
    one, two = ones(1, GPU), ones(2, GPU)
    assert ones(1, GPU) is one
    ones(3, GPU)
    assert ones(1, GPU) is one
    assert ones(2, GPU) is not two


@dataclass
class Part:
    x: Tensor
    others: tuple[Tensor, ...] = ()


def nested(count: int, device: torch.device) -> dict[str, list[Part]]:
    """Return three tensors of together ``count`` bytes; a fourth shares the memory of the first."""
    x = torch.ones(count // 2, dtype=torch.uint8)
    return {"parts": [Part(x, (torch.ones(count // 4, dtype=torch.uint8), x[1:])), Part(torch.ones(count // 16))]}


def test_a_cache_is_bounded_by_bytes(gpu: FakeDevice) -> None:
    made: list[int] = []

    @cache_by_stream(100, max_bytes=1000)
    def make(count: int, device: torch.device) -> dict[str, list[Part]]:
        made.append(count)
        return nested(count, device)

    for count in (480, 496, 480, 496):
        make(count, GPU)
    assert made == [480, 496]
    make(64, GPU)  # evicts the first
    make(496, GPU)
    make(480, GPU)  # evicts the third and the second, in the order of use
    make(64, GPU)
    assert made == [480, 496, 64, 480, 64]
    large = make(10_000, GPU)  # larger than the limit: kept alone
    assert make(10_000, GPU) is large
    make(64, GPU)
    make(480, GPU)
    make(64, GPU)
    assert made == [480, 496, 64, 480, 64, 10_000, 64, 480]


def test_bytes_of_evicted_and_cleared_entries_do_not_count(gpu: FakeDevice) -> None:
    made: list[int] = []

    @cache_by_stream(2, max_bytes=1000)
    def make(count: int, device: torch.device) -> Tensor:
        made.append(count)
        return torch.ones(count, dtype=torch.uint8)

    for count in (400, 401, 402, 403):  # evicts two by number
        make(count, GPU)
    make(402, GPU)
    make.cache_clear()  # type: ignore[attr-defined]
    for count in (500, 499, 500):
        make(count, GPU)
    assert made == [400, 401, 402, 403, 500, 499]


def test_an_evicted_tensor_is_freed_and_one_in_use_is_not(gpu: FakeDevice) -> None:
    @cache_by_stream(100, max_bytes=1000)
    def make(count: int, device: torch.device) -> Tensor:
        return torch.ones(count, dtype=torch.uint8)

    used, unused = make(400, GPU), weakref.ref(make(401, GPU))
    make(999, GPU)
    assert unused() is None
    assert used.sum() == 400


def test_entries_of_captures_are_not_evicted_by_bytes(gpu: FakeDevice) -> None:
    @cache_by_stream(100, max_bytes=1000)
    def make(count: int, device: torch.device) -> Tensor:
        return torch.ones(count, dtype=torch.uint8)

    captured = make(900, GPU)
    gpu.capturing = True
    make(900, GPU)
    gpu.capturing = False
    for count in range(800, 810):
        make(count, GPU)
    gpu.capturing = True
    assert make(900, GPU) is captured


def test_the_caches_of_index_tensors_are_bounded_by_bytes(gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry has the size of the whole limit, of which a CPU allocates no page."""
    copies: list[weakref.ref[Tensor]] = []

    def copy(array: np.ndarray, device: torch.device) -> Tensor:
        x = torch.empty(streams.MAX_BYTES, dtype=torch.uint8)
        copies.append(weakref.ref(x))
        return x

    monkeypatch.setattr(slots, "copy_to_device", copy)
    monkeypatch.setattr(global_indices, "copy_to_device", copy)
    for stop in (1, 2, 3):
        slots._index(((0, stop),), GPU)
        global_indices._tokens(SlotTokens(np.array([[0, stop, 1]])), stop, GPU)
    assert [x() is None for x in copies] == [True] * 4 + [False] * 2
    rs.clear_caches()


def test_a_capture_receives_the_entry_of_another_stream_and_keeps_it(gpu: FakeDevice) -> None:
    made = ones(3, GPU)
    gpu.stream, gpu.capturing = (0, 2), True
    assert ones(3, GPU) is made
    gpu.capturing = False
    for count in range(4, 9):
        ones(count, GPU)  # evicts the entry of 3, but not for graphs
    assert ones(3, GPU) is not made
    gpu.capturing = True
    assert ones(3, GPU) is made


@pytest.mark.parametrize("clear", [rs.clear_caches, ones.cache_clear])  # type: ignore[attr-defined]
def test_clearing_releases_what_captures_kept(gpu: FakeDevice, clear: Callable[[], None]) -> None:
    made = weakref.ref(ones(3, GPU))
    gpu.capturing = True
    assert ones(3, GPU) is made()
    clear()
    assert made() is None
    with pytest.raises(KernelError, match="run the same call once"):
        ones(3, GPU)


def test_entries_of_captures_survive_where_asked(gpu: FakeDevice) -> None:
    made = ones(3, GPU)
    gpu.capturing = True
    ones(3, GPU)
    ones.cache_clear(keep_graphs=True)  # type: ignore[attr-defined]
    assert ones(3, GPU) is made
    gpu.capturing = False
    assert ones(3, GPU) is not made


def test_nothing_is_made_during_capture(gpu: FakeDevice) -> None:
    gpu.capturing = True
    with pytest.raises(KernelError, match="run the same call once before capture"):
        ones(11, GPU)
    with pytest.raises(KernelError, match="this kernel copies a mask from the host in every call"):
        streams.copy_to_device(np.arange(3), GPU)


def test_nothing_is_made_during_capture_under_a_dispatch_mode(gpu: FakeDevice) -> None:
    gpu.capturing = True
    with FakeTensorMode(), pytest.raises(KernelError, match="run the same call once"):
        ones(11, GPU)


def test_a_fake_tensor_is_not_cached(gpu: FakeDevice) -> None:
    with FakeTensorMode():
        fake = ones(5, GPU)
    assert isinstance(fake, FakeTensor)
    assert not isinstance(ones(5, GPU), FakeTensor)


def test_copy_to_device_ignores_the_default_device() -> None:
    with torch.device("meta"):
        assert streams.copy_to_device(np.arange(3), CPU).tolist() == [0, 1, 2]


def test_a_cpu_has_one_entry_for_all_streams() -> None:
    assert ones(3, CPU) is ones(3, CPU)
    assert ones(3, CPU) is not ones(4, CPU)
