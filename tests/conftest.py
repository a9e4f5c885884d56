"""Shared by all tests: the profiles of hypothesis, pools of workers, and skipping GPU tests on machines without one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from ringspan.testing.workers import Pool

# In CI the same examples every time, so that a failure can be repeated; elsewhere new ones, to find more.
settings.register_profile("local", deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class Pools:
    """Pools of gloo workers, each started once for the whole run. A pool that a failing job closed is started again."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        if world not in self._pools or self._pools[world].is_closed:
            self._pools[world] = Pool(world)
        return self._pools[world]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """``pools(4)`` is a pool of four workers."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """A process group of one rank, for blocks whose group is the whole world."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
