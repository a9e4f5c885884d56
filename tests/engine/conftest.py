"""Run the tests of the engine with one thread, which is faster than several for small tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringspan.testing.threads import one_thread


@pytest.fixture(autouse=True, scope="package")
def one_thread_for_small_tensors() -> Iterator[None]:
    with one_thread():
        yield
