"""Which rank computes which heads.

Query heads are assigned in order, and no rank gets more than ⌈heads / ranks⌉, since work is proportional to query heads
and all ranks wait for the slowest. Of the assignments that satisfy this, the one that splits the fewest groups is
chosen. A group is the query heads that share a key head. A key head is sent to every rank that has some of its group,
so each split sends its keys once more.

::

    8 query heads, 2 key heads      4 ranks: 0 1 | 2 3 | 4 5 | 6 7     key heads 0 0 1 1: each goes to two ranks
    6 query heads, 3 key heads      2 ranks: 0 1 2 | 3 4 5             key heads 0 1 and 1 2
    6 query heads, 2 key heads      4 ranks: 0 | 1 2 | 3 | 4 5         key heads 0 0 1 1
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from ringspan.caching.by_digest import cache_by_digest
from ringspan.errors import PlanError
from ringspan.plans.data import Side

MAX_HEADS = 2**16


class Run(NamedTuple):
    """A range of query heads and the key heads that they share, with equally many query heads for each key head. One
    task computes a run."""

    q: tuple[int, int]
    kv: tuple[int, int]

    def of(self, side: Side) -> tuple[int, int]:
        return self.q if side == "q" else self.kv


@cache_by_digest(64, plain=True)
def share_heads(heads: int, kv_heads: int, ranks: int) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of each rank. Ranks beyond the number of query heads have none.

    >>> share_heads(6, 3, 2)
    ((Run(q=(0, 2), kv=(0, 1)), Run(q=(2, 3), kv=(1, 2))), (Run(q=(3, 4), kv=(1, 2)), Run(q=(4, 6), kv=(2, 3))))
    """
    group = heads // kv_heads
    busy = min(heads, ranks)
    return (*(_runs(a, b, group) for a, b in pairwise(_cuts(heads, group, busy))), *[()] * (ranks - busy))


@cache_by_digest(64, plain=True)
def split_key_heads(heads: int, kv_heads: int, ranks: int) -> frozenset[int]:
    """Return the key heads that several runs share. Their gradients are sums over these runs.

    >>> split_key_heads(6, 3, 2), split_key_heads(8, 2, 2)
    (frozenset({1}), frozenset())
    """
    runs = Counter(head for of_rank in share_heads(heads, kv_heads, ranks) for run in of_rank for head in range(*run.kv))
    return frozenset(head for head, count in runs.items() if count > 1)


def _cuts(heads: int, group: int, ranks: int) -> tuple[int, ...]:
    """Return the boundaries of the ranks' heads: the fewest split groups, then the most even parts.

    Dynamic programming over the parts and the heads at which a part may end.
    """
    most = -(-heads // ranks)
    best: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {0: ((0, 0), (0,))}
    for after in reversed(range(ranks)):  # how many parts come after this one
        first = heads - after * most  # an earlier end would leave too many heads for them
        longer: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {}
        for start, ((split, uneven), cuts) in best.items():
            for stop in range(max(start, first), min(start + most, heads) + 1):
                found = (split + (stop % group > 0 and stop > start), uneven + (stop - start) ** 2), (*cuts, stop)
                longer[stop] = min(found, longer.get(stop, found))
        best = longer
    return best[heads][1]


def _runs(start: int, stop: int, group: int) -> tuple[Run, ...]:
    """Return the query heads from start to stop in runs. A group that is split at either end has fewer query heads than
    the others."""
    runs: list[Run] = []
    if start == stop:
        return ()
    for key in range(start // group, -(-stop // group)):
        a, b = max(start, key * group), min(stop, (key + 1) * group)
        if runs and runs[-1].q[1] - runs[-1].q[0] == (b - a) * (runs[-1].kv[1] - runs[-1].kv[0]):
            runs[-1] = Run((runs[-1].q[0], b), (runs[-1].kv[0], key + 1))
        else:
            runs.append(Run((a, b), (key, key + 1)))
    return tuple(runs)


def check_heads(heads: object, kv_heads: object) -> None:
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads >= 1 and heads >= 1 and heads % kv_heads == 0):
        raise PlanError(
            f"heads must be a multiple of kv_heads, both integers of at least 1; got heads={heads!r}, kv_heads={kv_heads!r}"
        )
    if heads > MAX_HEADS:
        raise PlanError(f"at most {MAX_HEADS} query heads can be split over ranks, not {str(heads)[:40]}")
