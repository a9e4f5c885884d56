"""Packed documents: a query sees only its own document."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.causal import Align, diagonal
from ringspan.masks.mask import Mask, length
from ringspan.masks.mask import lengths as as_lengths
from ringspan.masks.table import MAX_LENGTH


def documents(
    lengths: Any = None, *, ids: Any = None, kv_lengths: Any = None, causal: bool = True, align: Align | None = None
) -> Mask:
    """Documents packed end to end, given by their ``lengths`` or by the document ``ids`` of every token.

    Tokens of one id see each other at any distance; ids need not be sorted. ``kv_lengths`` gives each document another
    number of keys (cross-attention between packed pairs); causal then needs ``align`` (see :func:`ringspan.causal`).

    >>> print(documents([1, 3]).ascii())
    x . . .
    . x . .
    . x x .
    . x x x
    >>> documents(ids=[7, 4, 4, 4]) == documents([1, 3])
    True
    """
    if (lengths is None) == (ids is None):
        raise MaskError("documents() takes the lengths of the documents or the ids= of the tokens: exactly one of the two")
    diagonal(0, 0, align)  # rejects an invalid align even where none is needed
    if ids is not None:
        if kv_lengths is not None:
            raise MaskError("documents(ids=…) describes both queries and keys; give lengths and kv_lengths instead")
        return _by_ids(ids, causal)
    q_lengths = as_lengths("lengths", lengths)
    k_lengths = q_lengths if kv_lengths is None else as_lengths("kv_lengths", kv_lengths)
    if len(q_lengths) != len(k_lengths):
        raise MaskError(f"{len(q_lengths)} documents have lengths but {len(k_lengths)} have kv_lengths: both need one each")
    q1, k1 = np.cumsum(q_lengths), np.cumsum(k_lengths)
    q0, k0 = q1 - q_lengths, k1 - k_lengths
    far = np.full_like(q0, MAX_LENGTH)
    offsets = [diagonal(q, k, align) for q, k in zip(q_lengths.tolist(), k_lengths.tolist(), strict=True)] if causal else far
    hi = k0 - q0 + np.asarray(offsets, dtype=np.int64) if causal else far
    bands = tables.tighten(np.stack([q0, q1, k0, k1, -far, hi], axis=1))
    return _named(bands, int(q_lengths.sum()), int(k_lengths.sum()), len(q_lengths), causal)


def _by_ids(ids: Any, causal: bool) -> Mask:
    try:
        id_of = np.asarray(ids.tolist() if hasattr(ids, "tolist") else ids)
    except ValueError:
        raise MaskError(f"ids must be a flat list of whole numbers, one per token; got {ids!r}") from None
    if id_of.ndim != 1 or (len(id_of) and id_of.dtype.kind not in "iu"):
        raise MaskError(f"ids must be a flat list of whole numbers, one per token; got {id_of.dtype} of shape {id_of.shape}")
    n = length("the number of ids", len(id_of))
    start = np.flatnonzero(np.concatenate([[True], id_of[1:] != id_of[:-1]])) if n else np.zeros(0, dtype=np.int64)
    stop = np.append(start[1:], n) if n else start
    name, run_of = np.unique(id_of[start], return_inverse=True)
    # Each run of an id sees the runs of the same id: all of them, or those up to its own when causal.
    order = np.argsort(run_of, kind="stable")
    count = np.bincount(run_of, minlength=len(name))
    first = np.cumsum(count) - count
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
