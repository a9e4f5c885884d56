"""The registry of shards when several threads use it. Its rules are tested over processes in test_sharding.py."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from ringspan.compat.shard_registry import ShardRegistry
from ringspan.layouts import Layout, contiguous, zigzag
from ringspan.masks import full


class CallsWhenHashed(tuple[Layout, ...]):
    """Layouts whose hash calls a function, to switch to another thread at a known point."""

    call: Callable[[], None]

    def __hash__(self) -> int:
        self.call()
        return super().__hash__()


@pytest.mark.parametrize("switch_at", [1, 2, 3])
def test_a_thread_can_record_shards_while_another_looks_for_layouts(switch_at: int) -> None:
    """The second thread records at the n-th hash in ``in_use``. The first thread must not see half of its change."""
    registry, shards = ShardRegistry(), [torch.zeros(1) for _ in range(3)]
    other_layouts = (zigzag(full(12), 2),)
    recorder = threading.Thread(target=registry.register_shards, args=([(shards[2], other_layouts)],))
    hashes = 0

    def record_in_another_thread() -> None:
        nonlocal hashes
        hashes += 1
        if hashes == switch_at:
            recorder.start()
            recorder.join(0.5)  # it finishes now, or waits until this thread is done with the registry

    layouts = CallsWhenHashed((contiguous(full(8), 2),))
    layouts.call = record_in_another_thread
    registry.register_shards([(shards[0], layouts), (shards[1], layouts)])
    hashes = 0
    assert set(registry.in_use()) == {8}
    recorder.join()
    assert set(registry.in_use()) == {8, 12}
    assert registry.layouts_of_shard(shards[2]) == other_layouts
