"""Packed documents: a query sees only its own document."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.batch import BatchMask, per_row
from ringspan.masks.causal import Align, diagonal
from ringspan.masks.mask import Mask, length
from ringspan.masks.mask import lengths as as_lengths
from ringspan.masks.table import K0, K1, MAX_LENGTH, Q0, Q1


def documents(
    lengths: Any = None,
    *,
    ids: Any = None,
    cu_seqlens: Any = None,
    kv_lengths: Any = None,
    causal: bool = True,
    align: Align | None = None,
) -> Mask:
    """Make a mask of documents packed end to end, given by their ``lengths``, by the document ``ids`` of every token,
    or by ``cu_seqlens``, the cumulative lengths that flash attention takes: a 0, then the end of each document.

    Tokens with the same id see each other at any distance; ids need not be sorted. ``kv_lengths`` gives each document
    another number of keys (cross-attention between packed pairs). A causal mask then needs ``align`` (see
    :func:`ringspan.causal`).

    >>> print(documents([1, 3]).ascii())
    x . . .
    . x . .
    . x x .
    . x x x
    >>> documents(ids=[7, 4, 4, 4]) == documents(cu_seqlens=[0, 1, 4]) == documents([1, 3])
    True

    A list of lists gives the lengths for each row of a batch (:func:`ringspan.per_row`). All rows have as many tokens.

    >>> documents([[700, 324], [1024], [512, 512]])
    <Mask documents(3 rows of 1024 tokens): 3072 × 3072, area 1085456, 5 bands>
    """
    if sum(given is not None for given in (lengths, ids, cu_seqlens)) != 1:
        raise MaskError(
            "documents() takes the lengths of the documents, the ids= of the tokens or cu_seqlens=: exactly one of these"
        )
    diagonal(0, 0, align)  # rejects an invalid align even where none is needed
    if ids is not None:
        if kv_lengths is not None:
            raise MaskError("documents(ids=…) describes both queries and keys; give lengths and kv_lengths instead")
        return _by_ids(ids, causal)
    if isinstance(lengths, list | tuple) and lengths and all(isinstance(row, list | tuple) for row in lengths):
        return _by_rows(lengths, kv_lengths, causal, align)
    if cu_seqlens is not None:
        q_lengths = _differences(cu_seqlens)
    else:
        q_lengths = as_lengths("lengths", lengths)
        if look_cumulative(q_lengths):
            raise MaskError(
                f"{_start_of(q_lengths)} look like cumulative lengths: pass them as cu_seqlens=. "
                "If they are lengths, leave out the empty first document"
            )
    k_lengths = q_lengths if kv_lengths is None else as_lengths("kv_lengths", kv_lengths)
    if len(q_lengths) != len(k_lengths):
        raise MaskError(f"{len(q_lengths)} documents have lengths but {len(k_lengths)} have kv_lengths: both need one each")
    return _end_to_end(q_lengths, k_lengths, causal, align)


def _end_to_end(q_lengths: NDArray[np.int64], k_lengths: NDArray[np.int64], causal: bool, align: Align | None) -> Mask:
    q1, k1 = np.cumsum(q_lengths), np.cumsum(k_lengths)
    q0, k0 = q1 - q_lengths, k1 - k_lengths
    far = np.full_like(q0, MAX_LENGTH)
    hi = far
    if causal:
        for n in np.flatnonzero(q_lengths != k_lengths)[:1]:
            diagonal(int(q_lengths[n]), int(k_lengths[n]), align)  # rejects a missing align
        hi = k1 - q1 if align == "end" else k0 - q0
    bands = tables.tighten(np.stack([q0, q1, k0, k1, -far, hi], axis=1))
    return _named(bands, int(q_lengths.sum()), int(k_lengths.sum()), len(q_lengths), causal)


def look_cumulative(lengths: NDArray[np.int64]) -> bool:
    """Return whether these are probably cumulative lengths: a 0, then numbers that grow.

    >>> look_cumulative(np.array([0, 3, 5])), look_cumulative(np.array([3, 5]))
    (True, False)
    """
    return len(lengths) > 2 and bool(lengths[0] == 0 and (np.diff(lengths) > 0).all())


def _by_rows(lengths: Any, kv_lengths: Any, causal: bool, align: Align | None) -> Mask:
    if kv_lengths is not None and not isinstance(kv_lengths, list | tuple):
        raise MaskError(
            f"lengths are those of {len(lengths)} rows, so kv_lengths must be a list for each; got {kv_lengths!r:.100}"
        )
    of_keys = [None] * len(lengths) if kv_lengths is None else kv_lengths
    if len(of_keys) != len(lengths):
        raise MaskError(f"{len(lengths)} rows have lengths but {len(of_keys)} have kv_lengths: both need one list each")
    of_queries = [as_lengths(f"lengths[{i}]", row) for i, row in enumerate(lengths)]
    rows = [documents(q, kv_lengths=k, causal=causal, align=align) for q, k in zip(of_queries, of_keys, strict=True)]
    batch = per_row(rows)
    return BatchMask(batch.rows, name=batch.name.replace("per_row", "documents"))


def _differences(cu_seqlens: Any) -> NDArray[np.int64]:
    """Return the lengths of documents from their cumulative lengths."""
    wanted = "cu_seqlens must be a list of integers: a 0, then the end of each document, in order"
    try:
        ends = np.asarray(cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens)
    except ValueError:
        raise MaskError(f"{wanted}; got {cu_seqlens!r}") from None
    if ends.ndim != 1 or ends.dtype.kind not in "iu":
        raise MaskError(f"{wanted}; got {ends.dtype} of shape {ends.shape}")
    if not len(ends) or ends[0] != 0 or (np.diff(ends) < 0).any():
        raise MaskError(f"{wanted}; got {_start_of(ends)}")
    return as_lengths("the differences of cu_seqlens", np.diff(ends))


def _start_of(values: NDArray[np.int64]) -> str:
    return f"[{', '.join(map(str, values[:6]))}{', …' if len(values) > 6 else ''}]"


def document_windows(lengths: Any, kv_lengths: Any, *, left: int | None, right: int | None) -> Mask:
    """Packed documents with a window in each, aligned at the end of the document; None means no limit on that side.

    The last query of a document is aligned with its last key, as in flash attention: of ``n`` queries and ``m`` keys,
    query ``q`` sees keys from ``q + m - n - left`` to ``q + m - n + right``, both counted from the start of the
    document.

    >>> print(document_windows([1, 3], [2, 3], left=1, right=0).ascii())
    x x . . .
    . . x . .
    . . x x .
    . . . x x
    """
    q_lengths, k_lengths = as_lengths("lengths", lengths), as_lengths("kv_lengths", kv_lengths)
    q1, k1 = np.cumsum(q_lengths), np.cumsum(k_lengths)
    offset = k1 - q1
    lo = offset - (MAX_LENGTH if left is None else length("left", left))
    hi = offset + (MAX_LENGTH if right is None else length("right", right))
    bands = tables.tighten(np.stack([q1 - q_lengths, q1, k1 - k_lengths, k1, lo, hi], axis=1))
    causal = left is None and right == 0
    mask = _named(bands, int(q_lengths.sum()), int(k_lengths.sum()), len(q_lengths), causal)
    sides = [f"{side}={n}" for side, n in (("left", left), ("right", right)) if n is not None]
    if causal or not sides:
        return mask
    return Mask(bands, mask.q_len, mask.k_len, name=f"{mask.name} & window({', '.join(sides)})")


def document_hulls(mask: Mask) -> NDArray[np.int64]:
    """Return the smallest rectangle (q0, q1, k0, k1) around each document of a mask, as the rows of an array.

    Documents are groups of bands that follow each other both in the queries and in the keys. They are derived from the
    bands, for any numbers of queries and keys.

    >>> document_hulls(documents([1, 3], kv_lengths=[2, 2], causal=False)).tolist()
    [[0, 1, 0, 2], [1, 4, 2, 4]]
    """
    bands = mask.table[np.argsort(mask.table[:, Q0], kind="stable")]
    if not len(bands):
        return np.zeros((0, 4), dtype=np.int64)
    starts, stops = bands[:, [Q0, K0]], bands[:, [Q1, K1]]
    reached = np.maximum.accumulate(stops)  # by this band and those before it
    ahead = np.minimum.accumulate(starts[::-1])[::-1]  # of this band and those after it
    opens = np.flatnonzero(np.append(True, (ahead[1:] >= reached[:-1]).all(axis=1)))
    low, high = np.minimum.reduceat(starts, opens), np.maximum.reduceat(stops, opens)
    return np.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], axis=1)


def _by_ids(ids: Any, causal: bool) -> Mask:
    try:
        id_of = np.asarray(ids.tolist() if hasattr(ids, "tolist") else ids)
    except ValueError:
        raise MaskError(f"ids must be a flat list of integers, one per token; got {ids!r}") from None
    if id_of.ndim != 1 or (len(id_of) and id_of.dtype.kind not in "iu"):
        raise MaskError(f"ids must be a flat list of integers, one per token; got {id_of.dtype} of shape {id_of.shape}")
    n = length("the number of ids", len(id_of))
    start = np.flatnonzero(np.concatenate([[True], id_of[1:] != id_of[:-1]])) if n else np.zeros(0, dtype=np.int64)
    stop = np.append(start[1:], n) if n else start
    name, run_of = np.unique(id_of[start], return_inverse=True)
    # Each run of an id sees the runs of the same id: all of them, or those up to its own when causal.
    order = np.argsort(run_of, kind="stable")
    count = np.bincount(run_of, minlength=len(name))
    first = np.cumsum(count) - count
    if (pairs := int((count**2).sum())) > tables.MAX_BAND_PAIRS:
        raise MaskError(
            f"these ids change {len(start) - 1:,} times, and equal ones meet in {pairs:,} pairs of runs; at most "
            f"{tables.MAX_BAND_PAIRS:,} are possible: sort the tokens by their document, or use rs.mask_mod"
        )
    i = np.repeat(order, count[run_of[order]])
    j = order[tables.ranges(first[run_of[order]], count[run_of[order]])]
    if causal:
        i, j = i[j <= i], j[j <= i]
    far = np.full(len(i), MAX_LENGTH)
    hi = np.zeros(len(i), dtype=np.int64) if causal else far
    bands = tables.tighten(np.stack([start[i], stop[i], start[j], stop[j], -far, hi], axis=1))
    return _named(tables.coalesce(bands), n, n, len(name), causal)


def _named(bands: tables.Table, q_len: int, k_len: int, count: int, causal: bool) -> Mask:
    size = f"{q_len}" if q_len == k_len else f"{q_len} × {k_len}"
    name = f"documents({count} over {size} tokens{'' if causal else ', causal=False'})"
    return Mask(bands, q_len, k_len, name=name)
