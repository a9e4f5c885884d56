"""Find the blocks of 128 × 128 pairs that a block-sparse kernel computes, from the interval of keys of each row.

The pairs themselves are not evaluated. A block is *full* if all its pairs are visible, *partial* if some are. One that
extends beyond the sequence is partial::

    rows of 2, blocks of 2 × 2

    x x x . . .      f p .      full: from the last start to the first stop of its rows
    x x x . . .                 partial: all other blocks that an interval of its rows touches
    x . . . . .      p . p
    . . . . x x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.masks.table import Ints, ranges

BLOCK = 128

# torch.compile treats the sizes 0 and 1 as constants even with dynamic shapes, so tables are at least this large.
MIN_LENGTH = 2


class BlockTable(NamedTuple):
    """A list of blocks of keys for each block of queries, or the reverse: the first ``counts[i]`` of ``indices[i]``."""

    counts: NDArray[np.int32]  # (blocks,)
    indices: NDArray[np.int32]  # (blocks, length of the longest list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTables:
    """The same blocks by query and by key: the forward pass loops over keys, the gradient of keys over queries."""

    partial: BlockTable
    full: BlockTable
    partial_by_key: BlockTable
    full_by_key: BlockTable


def block_tables(
    start: Ints, stop: Ints, keys: int, *, size: int = BLOCK, all_partial: bool = False, min_length: int = MIN_LENGTH
) -> BlockTables:
    """Return the blocks of rows that each see the keys ``start <= k < stop``.

    ``all_partial``: no block counts as full, because a ``mask_mod`` may hide any pair. ``min_length`` is the least
    number of lists and their least length.

    >>> found = block_tables(np.array([0, 0, 0, 4]), np.array([3, 3, 1, 6]), 6, size=2)
    >>> found.full.counts.tolist(), found.partial.counts.tolist(), found.partial.indices.tolist()
    ([1, 0], [1, 2], [[1, 0], [0, 2]])
    """
    # Rows beyond the sequence see no key, so a block with such rows is never full.
    over = -len(start) % size
    start_RN, stop_RN = (np.pad(x, (0, over)).reshape(-1, size) for x in (start, stop))
    q, k = _touched(start_RN // size, -(-stop_RN // size))
    full = (-(-start_RN.max(1) // size)[q] <= k) & (k < (stop_RN.min(1) // size)[q])
    full &= not all_partial
    partial, full_ = _lists(q, k, full, len(start_RN), min_length)
    by_key = np.argsort(k, kind="stable")
    partial_by_key, full_by_key = _lists(k[by_key], q[by_key], full[by_key], -(-keys // size), min_length)
    return BlockTables(partial=partial, full=full_, partial_by_key=partial_by_key, full_by_key=full_by_key)


def _touched(first_RN: Ints, last_RN: Ints) -> tuple[Ints, Ints]:
    """Return all pairs (block of queries, block of keys) in which one of the N rows sees a key, in order."""
    order = np.argsort(first_RN, axis=1)
    first_RN, last_RN = (np.take_along_axis(x, order, axis=1) for x in (first_RN, last_RN))
    # Rows in order of their first block: one begins a new run if it begins after the end of all rows before it.
    reach_RN = np.maximum.accumulate(last_RN, axis=1)
    begins = np.ones(first_RN.size + 1, dtype=np.bool_)
    begins[:-1].reshape(first_RN.shape)[:, 1:] = first_RN[:, 1:] > reach_RN[:, :-1]
    first, last = first_RN.ravel()[begins[:-1]], reach_RN.ravel()[begins[1:]]
    q = np.flatnonzero(begins[:-1]) // first_RN.shape[1]
    return np.repeat(q, last - first), ranges(first, last - first)


def _lists(owner: Ints, item: Ints, full: NDArray[np.bool_], owners: int, min_length: int) -> list[BlockTable]:
    """Return a table of the partial blocks and one of the full blocks. Each has a list of items for each owner.

    The pairs (owner, item) are ordered by owner. Both tables are equally wide: FlexAttention indexes the full one with
    the stride of the partial one.
    """
    counts = [np.bincount(owner[which], minlength=max(owners, min_length)) for which in (~full, full)]
    most = max(min_length, *(int(n.max()) for n in counts))
    lists = []
    for which, n in zip((~full, full), counts, strict=True):
        indices = np.zeros((len(n), most), dtype=np.int32)
        indices[owner[which], ranges(np.zeros_like(n), n)] = item[which]
        lists.append(BlockTable(n.astype(np.int32), indices))
    return lists
