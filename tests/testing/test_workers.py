"""The pool of workers: results in order, messages, and failures that are told."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringspan.testing.workers import Pool, WorkerFailed, tell
from tests.conftest import Pools


def add_up(rank: int, x: float) -> tuple[int, float]:
    total = torch.tensor(x * (rank + 1))
    dist.all_reduce(total)
    return rank, total.item()


def chat(rank: int) -> None:
    for n in range(2):
        tell((rank, n))


def stumble(rank: int) -> None:
    if rank == 1:
        raise ValueError("a stone in the way")


def vanish(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.barrier()


def test_results_come_in_the_order_of_the_ranks(pools: Pools) -> None:
    assert pools(3).run(add_up, 2.0) == [(0, 12.0), (1, 12.0), (2, 12.0)]
    assert pools(3).run(add_up, 1.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_messages(pools: Pools) -> None:
    heard: list[Any] = []
    pools(3).run(chat, on_message=lambda rank, message: heard.append((rank, message)))
    assert sorted(heard) == [(r, (r, n)) for r in range(3) for n in range(2)]


@pytest.mark.parametrize(
    ("job", "message"), [(stumble, "worker 1: (.|\n)*a stone in the way"), (vanish, r"worker 0: went away \(exit code 3\)")]
)
def test_failures_are_told_and_close_the_pool(job: Any, message: str) -> None:
    with Pool(2) as pool:
        with pytest.raises(WorkerFailed, match=message):
            pool.run(job)
        with pytest.raises(WorkerFailed, match="closed"):
            pool.run(add_up, 1.0)
