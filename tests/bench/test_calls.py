"""Limits for the Python functions of ringspan that one attention call runs, their files, and the depth of the stack."""

from __future__ import annotations

import pytest

from ringspan.bench.calls import CallCounter, CallFigures, count_calls
from ringspan.caching.registry import clear_caches
from tests.conftest import Pools

# On one rank: the most calls, files and frames. A change that needs more of them adds layers to every call of
# attention.
LIMITS = {
    "sdpa, forward": CallFigures(calls=80, files=16, depth=10),
    "sdpa, backward": CallFigures(calls=80, files=11, depth=8),
    "flex, forward": CallFigures(calls=140, files=36, depth=20),
    "flex, backward": CallFigures(calls=110, files=17, depth=9),
}


@pytest.mark.parametrize("function", ["sdpa", "flex"])
def test_a_call_stays_within_the_limits(pools: Pools, function: str) -> None:
    (figures,) = pools(1).run(count_calls, function == "flex")
    for phase, counted in zip(("forward", "backward"), figures, strict=True):
        limit = LIMITS[f"{function}, {phase}"]
        assert all(n <= most for n, most in zip(counted, limit, strict=True)), f"{function}, {phase}: {counted}, limit {limit}"


def test_the_counter_counts_ringspan_only() -> None:
    counter = CallCounter()
    assert counter.run(lambda: sorted([3, 1, 2], key=lambda x: -x)) == [3, 2, 1]
    assert counter.figures == CallFigures(calls=0, files=0, depth=0)
    counter.run(clear_caches)
    calls, files, depth = counter.figures
    assert calls >= files > 1
    assert depth > 1
