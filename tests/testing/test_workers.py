"""The pool of workers: results in order, messages and failures."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringspan.testing.workers import Pool, WorkerFailed, send_message
from tests.conftest import Pools


def add_up(rank: int, x: float) -> tuple[int, float]:
    total = torch.tensor(x * (rank + 1))
    dist.all_reduce(total)
    return rank, total.item()


def send_two_messages(rank: int) -> None:
    for n in range(2):
        send_message((rank, n))


def raise_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("deliberate")


def exit_on_rank_0(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.barrier()


def test_results_come_in_the_order_of_the_ranks(pools: Pools) -> None:
    assert pools(3).run(add_up, 2.0) == [(0, 12.0), (1, 12.0), (2, 12.0)]
    assert pools(3).run(add_up, 1.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_messages(pools: Pools) -> None:
    received: list[Any] = []
    pools(3).run(send_two_messages, on_message=lambda rank, message: received.append((rank, message)))
    assert sorted(received) == [(r, (r, n)) for r in range(3) for n in range(2)]


@pytest.mark.parametrize(
    ("job", "message"), [(raise_on_rank_1, "worker 1: (.|\n)*deliberate"), (exit_on_rank_0, r"worker 0: ended \(exit code 3\)")]
)
def test_a_failure_raises_and_closes_the_pool(job: Any, message: str) -> None:
    with Pool(2) as pool:
        with pytest.raises(WorkerFailed, match=message):
            pool.run(job)
        with pytest.raises(WorkerFailed, match="closed"):
            pool.run(add_up, 1.0)


def parent(rank: int) -> int:
    return os.getppid()


def test_workers_are_forked_from_one_process_that_has_imported_a_module() -> None:
    with Pool(2, preload="ringspan") as pool:
        first, second = pool.run(parent)
    assert first == second != os.getpid()
