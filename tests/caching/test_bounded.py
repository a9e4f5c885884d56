"""Results that are bounded in number and bytes. The tests of both caches cover the rest."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest

from ringspan.caching.bounded import BoundedResults

Results = BoundedResults[int, set[int]]


@pytest.mark.parametrize(
    "drop",
    [lambda results: results.put(1, set(), 1), lambda results: results.put(0, set(), 1), BoundedResults.clear],
    ids=["evicted", "replaced", "cleared"],
)
def test_what_runs_when_a_result_is_freed_may_use_the_cache(drop: Callable[[Results], None]) -> None:
    results, found = Results(1, 100), []
    result: set[int] = set()
    weakref.finalize(result, lambda: found.append(results.items()))
    results.put(0, result, 1)
    del result
    thread = threading.Thread(target=drop, args=(results,), daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive(), "it waits for its own lock"
    assert len(found) == 1
