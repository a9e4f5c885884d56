"""The assignment of heads to ranks: against all possible assignments, and the properties of runs."""

from __future__ import annotations

import time
from itertools import combinations_with_replacement, pairwise

import pytest

import ringspan as rs
from ringspan.strategies.heads import Run, check_heads, share_heads

FEW = [(group * keys, keys, ranks) for group in range(1, 5) for keys in range(1, 4) for ranks in range(1, 6)]


def size(run: Run) -> tuple[int, int]:
    return run.q[1] - run.q[0], run.kv[1] - run.kv[0]


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [*FEW, (32, 8, 6), (64, 8, 12), (40, 10, 16), (7, 1, 64)])
def test_every_query_head_once_with_its_key_head(heads: int, kv_heads: int, ranks: int) -> None:
    shares = share_heads(heads, kv_heads, ranks)
    assert len(shares) == ranks
    pairs = []
    for run in (run for share in shares for run in share):
        n_q, n_kv = size(run)
        assert n_q % n_kv == 0
        pairs += [(run.q[0] + i, run.kv[0] + i * n_kv // n_q) for i in range(n_q)]
    assert pairs == [(head, head * kv_heads // heads) for head in range(heads)]


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), FEW)
def test_no_other_assignment_is_better(heads: int, kv_heads: int, ranks: int) -> None:
    """The least work of the busiest rank; then the fewest key heads that are sent."""

    def cost(cuts: tuple[int, ...]) -> tuple[int, int]:
        parts = [{head * kv_heads // heads for head in range(a, b)} for a, b in pairwise(cuts)]
        return max(b - a for a, b in pairwise(cuts)), sum(map(len, parts))

    ways = [(0, *inner, heads) for inner in combinations_with_replacement(range(heads + 1), ranks - 1)]
    shares = share_heads(heads, kv_heads, ranks)
    work = max(sum(size(run)[0] for run in share) for share in shares)
    assert (work, sum(size(run)[1] for share in shares for run in share)) == min(map(cost, ways))


@pytest.mark.parametrize(("heads", "kv_heads"), [(40964, 2), (65535, 65535), (65536, 1), (65534, 2)])
def test_many_heads_are_shared_within_a_second(heads: int, kv_heads: int) -> None:
    start = time.process_time()
    shares = share_heads(heads, kv_heads, 7)
    assert time.process_time() - start < 1.0
    assert sum(size(run)[0] for share in shares for run in share) == heads


def test_too_many_heads_are_refused() -> None:
    with pytest.raises(rs.PlanError, match="at most 65536 query heads can be split over ranks, not 4294967296"):
        rs.plan(rs.causal(64), world=4, strategy="ulysses(heads=4294967296, kv_heads=2)")


@pytest.mark.parametrize(("heads", "kv_heads"), [(0, 1), (4, 0), (6, 4), (4, 8), (4.0, 2), ("4", 2), (None, 1)])
def test_head_counts_that_are_refused(heads: object, kv_heads: object) -> None:
    with pytest.raises(rs.PlanError, match="heads must be a multiple of kv_heads, both integers of at least 1; got heads="):
        check_heads(heads, kv_heads)
