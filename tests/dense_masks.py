"""The definition of each mask: dense boolean arrays, made without ringspan.

Every test of the algebra compares with these. They are simple and slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Dense = NDArray[np.bool_]
Ints = NDArray[np.int64]


def cells(q_len: int, k_len: int, sees: Callable[[Ints, Ints], object]) -> Dense:
    """``sees(q, k)`` for every query (a column) and every key (a row)."""
    q, k = np.arange(q_len)[:, None], np.arange(k_len)[None, :]
    return np.broadcast_to(np.asarray(sees(q, k), dtype=np.bool_), (q_len, k_len)).copy()


def full(q_len: int, k_len: int) -> Dense:
    return cells(q_len, k_len, lambda q, k: True)


def causal(q_len: int, k_len: int, align: str = "start") -> Dense:
    ahead = {"start": 0, "end": k_len - q_len}[align]
    return cells(q_len, k_len, lambda q, k: k <= q + ahead)


def window(q_len: int, k_len: int, left: int | None, right: int | None) -> Dense:
    reaches_left = cells(q_len, k_len, lambda q, k: True if left is None else k >= q - left)
    reaches_right = cells(q_len, k_len, lambda q, k: True if right is None else k <= q + right)
    return reaches_left & reaches_right


def prefix(n: int, p: int) -> Dense:
    return cells(n, n, lambda q, k: (k < p) | (k <= q))


def chunked(n: int, size: int, causally: bool = True) -> Dense:
    return cells(n, n, lambda q, k: (q // size == k // size) & ((k <= q) | (not causally)))


def by_ids(ids: Sequence[int], causally: bool = True) -> Dense:
    id_of = np.array(ids, dtype=np.int64)
    return cells(len(ids), len(ids), lambda q, k: (id_of[q] == id_of[k]) & ((k <= q) | (not causally)))


def documents(q_lengths: Sequence[int], k_lengths: Sequence[int], causally: bool = True, align: str = "start") -> Dense:
    """One document after the other, each pasted where it lies."""
    dense = np.zeros((sum(q_lengths), sum(k_lengths)), dtype=np.bool_)
    q0 = k0 = 0
    for q_len, k_len in zip(q_lengths, k_lengths, strict=True):
        dense[q0 : q0 + q_len, k0 : k0 + k_len] = causal(q_len, k_len, align) if causally else full(q_len, k_len)
        q0, k0 = q0 + q_len, k0 + k_len
    return dense


def tree(lengths: Sequence[int], parents: Sequence[int], left: int | None = None) -> Dense:
    """Token by token: the path from the root, one node after the other, of which a token sees the part up to itself."""
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    dense = np.zeros((start[-1], start[-1]), dtype=np.bool_)
    for node, n in enumerate(lengths):
        path: list[int] = []
        above = node
        while above >= 0:
            path = [*range(start[above], start[above + 1]), *path]
            above = parents[above]
        for token in range(start[node], start[node] + n):
            seen = path[: path.index(token) + 1]
            dense[token, seen if left is None else seen[-left - 1 :]] = True
    return dense


def band(given: Sequence[int], q_len: int, k_len: int) -> Dense:
    q0, q1, k0, k1, lo, hi = given
    return cells(q_len, k_len, lambda q, k: (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1) & (lo <= k - q) & (k - q <= hi))


def bands(given: Iterable[Sequence[int]], q_len: int, k_len: int) -> Dense:
    """The union; a pair may be in many of them."""
    return times_covered(given, q_len, k_len) > 0


def times_covered(given: Iterable[Sequence[int]], q_len: int, k_len: int) -> Ints:
    """In how many of the bands each pair is: at most one, if they are disjoint."""
    count = np.zeros((q_len, k_len), dtype=np.int64)
    for one in given:
        count += band(one, q_len, k_len)
    return count
