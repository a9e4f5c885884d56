"""Worker pools whose jobs start with torch's default settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ringspan.testing.workers import Pool
from tests.compat.jobs import with_defaults
from tests.conftest import Pools


class _PoolWithDefaults:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pool.run(with_defaults, job, *args)


@pytest.fixture
def pools(pools: Pools) -> Callable[[int], _PoolWithDefaults]:
    return lambda world: _PoolWithDefaults(pools(world))
