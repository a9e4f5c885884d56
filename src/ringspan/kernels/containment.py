"""Keep NaN and infinities within their document, where one call computes several documents through a dense mask.

A pair that the mask hides has the weight 0. But 0 times NaN is NaN, so a NaN in one document would reach every document
of the call, in the result and in the gradients. Bands that share no query and no key, directly or through other bands,
are *independent*: no result of one depends on inputs of the other::

    x x . . .      documents of 2 and 3 tokens: two independent parts
    x x . . .      a NaN in key 1 must not change a bit of the results of queries 2 to 4
    . . x x x
    . . x x x
    . . x x x

The inputs are checked before the call. If all are finite, there is one call. If not, there are several calls with the
same shapes: one for all parts whose inputs are finite, and one for each other part. Each time the queries and keys of
the other parts are hidden, zeros are read in their place, and zeros are written for them. Adding a zero changes no bit,
so a part has the same bits as in a call in which every input is finite.

Only inputs in host memory are checked: on a GPU the host would have to wait for the device. So on a GPU each part is
always computed in a call of its own.

Legend: B batch, H heads, S queries, T keys, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.caching.by_digest import cache_by_digest
from ringspan.masks import Band

# Products of two rows below this norm are finite in float32, and so are sums of a few of them.
MAX_NORM = 2.0**60

# The bytes to which memory is aligned for vector instructions.
ALIGNMENT = 64


class Share(NamedTuple):
    """What one repetition of a call computes: its bands, and the rows that it reads and writes. None means all."""

    bands: tuple[Band, ...]
    queries_S: Tensor | None = None
    keys_T: Tensor | None = None

    def of_queries(self, x: Tensor) -> Tensor:
        """Return (B, H, S, D) or (B, H, S) with zeros in the queries of other parts."""
        return _zero_others(x, self.queries_S)

    def of_keys(self, x: Tensor) -> Tensor:
        """Return (B, H, T, D) with zeros in the keys of other parts."""
        return _zero_others(x, self.keys_T)


def contained_shares(
    bands: tuple[Band, ...], *, corner: tuple[int, int], of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> Iterator[Share]:
    """Yield the shares of a call that has other parts: on CPUs one share if all inputs are finite.

    ``corner`` is the first query and the first key of the tensors, which have rows in dim 2.
    """
    (q0, k0), is_on_host = corner, of_keys[0].device.type == "cpu"
    if is_on_host and all(_is_finite(x) for x in (*of_queries, *of_keys)):
        yield Share(bands)
        return

    def has_finite_inputs(part: tuple[Band, ...]) -> bool:
        queries = (x[:, :, band.q0 - q0 : band.q1 - q0] for band in part for x in of_queries)
        keys = (x[:, :, band.k0 - k0 : band.k1 - k0] for band in part for x in of_keys)
        return all(map(_is_finite, queries)) and all(map(_is_finite, keys))

    parts = independent_parts(bands)
    finite = [part for part in parts if has_finite_inputs(part)] if is_on_host else []
    shares = [part for part in parts if part not in finite]
    if finite:
        shares.append(tuple(band for part in finite for band in part))
    for share in shares:
        queries_S = _rows_of([(band.q0 - q0, band.q1 - q0) for band in share], of_queries[0])
        yield Share(share, queries_S, _rows_of([(band.k0 - k0, band.k1 - k0) for band in share], of_keys[0]))


@cache_by_digest(1024, plain=True)
def independent_parts(bands: tuple[Band, ...]) -> tuple[tuple[Band, ...], ...]:
    """Group the bands that share queries or keys, directly or through other bands.

    A band of one diagonal has one part for each of its pairs.

    >>> parts = independent_parts((Band(0, 2, 0, 2, -1, 1), Band(2, 4, 3, 5, 0, 2), Band(4, 5, 0, 1, -4, -4)))
    >>> [[band.q0 for band in part] for part in parts]
    [[0, 4], [2]]
    """
    pieces = [piece for band in bands for piece in _pairs_of_diagonal(band)]
    parent = list(range(len(pieces)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for start, stop in ((0, 1), (2, 3)):  # by queries, then by keys
        reach, last = -1, -1
        for i in sorted(range(len(pieces)), key=lambda i: pieces[i][start]):
            if pieces[i][start] < reach:
                parent[root(i)] = root(last)
            reach, last = max(reach, pieces[i][stop]), i
    parts: dict[int, list[Band]] = {}
    for i, piece in enumerate(pieces):
        parts.setdefault(root(i), []).append(piece)
    return tuple(map(tuple, parts.values()))


def is_one_part(bands: tuple[Band, ...]) -> bool:
    """Return whether the smallest rectangle around the bands has the queries and keys of one independent part only.

    >>> is_one_part((Band(0, 1, 0, 2, 0, 1), Band(1, 2, 0, 2, -1, 0)))
    True
    >>> is_one_part((Band(0, 1, 0, 2, 0, 1), Band(2, 3, 0, 2, -2, -1)))  # query 1 is between them
    False
    """
    return len(independent_parts(bands)) <= 1 and not any(
        _has_gap([(band[start], band[stop]) for band in bands]) for start, stop in ((0, 1), (2, 3))
    )


def _has_gap(ranges: list[tuple[int, int]]) -> bool:
    reach = None
    for start, stop in sorted(ranges):
        if reach is not None and start > reach:
            return True
        reach = stop if reach is None else max(reach, stop)
    return False


def _pairs_of_diagonal(band: Band) -> Iterator[Band]:
    if band.lo < band.hi:
        yield band
        return
    for i in range(band.rows):
        yield Band(band.q0 + i, band.q0 + i + 1, band.k0 + i, band.k0 + i + 1, band.lo, band.hi)


def _is_finite(x: Tensor) -> bool:
    """Return whether all values are finite, and small enough that their products are. NaN compares as False."""
    return torch.linalg.vector_norm(x).item() < MAX_NORM


def _rows_of(ranges: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
    rows = torch.zeros(like.shape[2], dtype=torch.bool, device=like.device)
    for start, stop in ranges:
        rows[start:stop] = True
    return rows


def _zero_others(x: Tensor, rows_S: Tensor | None) -> Tensor:
    if rows_S is None:
        return x
    # The copy keeps strides and alignment: with others, matrix products may sum in another order.
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    memory = x.new_empty(span + ALIGNMENT // x.element_size())
    offset = (x.data_ptr() - memory.data_ptr()) % ALIGNMENT // x.element_size()
    copy = memory.as_strided(x.shape, x.stride(), offset).copy_(x)
    return copy.masked_fill_(~(rows_S if x.ndim == 3 else rows_S[:, None]), 0.0)
