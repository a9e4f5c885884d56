"""The cache of planning: bounded, by digest, and safe when threads plan ahead."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from ringspan.caching.by_digest import remember


def test_the_last_ones_are_kept() -> None:
    asked = []

    @remember(2)
    def double(x: int) -> int:
        asked.append(x)
        return 2 * x

    assert [double(x) for x in (1, 2, 1, 3, 1, 2)] == [2, 4, 2, 6, 2, 4]
    assert asked == [1, 2, 3, 2]


def test_who_looks_up_does_not_wait_for_who_computes() -> None:
    begun, go_on = threading.Event(), threading.Event()

    @remember(4)
    def slow(x: int) -> int:
        if x:
            begun.set()
            assert go_on.wait(60)
        return x

    slow(0)
    with ThreadPoolExecutor(1) as other:
        later = other.submit(slow, 1)
        assert begun.wait(60)
        assert slow(0) == 0
        go_on.set()
        assert later.result() == 1


def test_many_threads_over_a_cache_that_is_too_small() -> None:
    @remember(3)
    def square(x: int) -> int:
        return x * x

    with ThreadPoolExecutor(8) as threads:
        asked = [n % 7 for n in range(20_000)]
        assert list(threads.map(square, asked, chunksize=100)) == [x * x for x in asked]
