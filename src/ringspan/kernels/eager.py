"""The eager kernel: attention with plain PyTorch operations, for any device, dtype, ``score_mod`` and ``mask_mod``.

It is used where FlexAttention cannot be compiled, and computes gradients on a CPU, too. The queries are split into
blocks of rows. A block is multiplied with the keys from the first to the last that any of its rows sees. Hidden pairs
are masked.

Legend: B batch, H query heads, G key heads (G divides H), R = H / G, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ringspan.caching.by_digest import cache_by_digest
from ringspan.caching.by_stream import copy_to_device
from ringspan.kernels.containment import Share, contained_shares, is_one_part
from ringspan.kernels.kernel import Gradients, Inputs, PartialRows, Saved, accumulation_dtype
from ringspan.kernels.mods import IndexedMods
from ringspan.kernels.partial import EMPTY_LSE, Partial, finite_lse
from ringspan.kernels.recompute import gradients
from ringspan.masks import MAX_LENGTH, Band
from ringspan.masks import table as tables
from ringspan.masks.table import K0, K1, Q0, Q1
from ringspan.user_functions.captures import SubstituteTensors, enable_function_mode

T = TypeVar("T")

# The most scores in memory at a time, and the most rows of a block. Small blocks compute fewer hidden pairs.
MAX_SCORES = 2**22
MAX_ROWS = 256


def unsupported_reason(inputs: Inputs) -> str | None:
    return None


def auto_skip_reason(inputs: Inputs) -> str | None:
    return None if inputs.has_mods else "is taken only if there is a score_mod or a mask_mod"


def attend(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    mods: IndexedMods | None = None,
) -> Iterator[PartialRows]:
    for block in _blocks(bands, q_BHSD, k_BGTD):
        rows, keys, *_ = block
        q, k, v = q_BHSD[:, :, rows], k_BGTD[:, :, keys], v_BGTE[:, :, keys]
        for share in _shares(block, (q,), (k, v)):
            compute = partial(_attend, block=block, bands=share.bands, scale=scale, mods=mods, reduce=_softmax)
            if share.queries_S is None:
                result = compute(q, k, v)
            else:
                out, lse = compute(share.of_queries(q), share.of_keys(k), share.of_keys(v))
                result = Partial(share.of_queries(out), lse)
            yield PartialRows(rows.start, rows.stop, result)


def attend_backward(
    saved: Saved,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    mods: IndexedMods | None = None,
) -> Iterator[Gradients]:
    learned = () if mods is None else mods.mods.learned
    for block in _blocks(bands, saved.q_BHSD, k_BGTD):
        rows, keys, *_ = block
        of_block, k, v = saved.rows(rows.start, rows.stop), k_BGTD[:, :, keys], v_BGTE[:, :, keys]
        of_queries = [x for x in of_block._replace(lse_BHS=finite_lse(of_block.lse_BHS)) if x is not None]
        for share in _shares(block, of_queries, (k, v)):
            again = partial(_attend, block=block, bands=share.bands, scale=scale, mods=mods, reduce=_softmax)
            if share.queries_S is None:
                dq, dk, dv, *dlearned = gradients(again, of_block, k, v, learned)
            else:
                visible = Saved(*map(share.of_queries, of_queries))
                dq, dk, dv, *dlearned = gradients(again, visible, share.of_keys(k), share.of_keys(v), learned)
                dq, dk, dv = share.of_queries(dq), share.of_keys(dk), share.of_keys(dv)
            yield Gradients(rows, dq, keys, dk, dv, tuple(dlearned))


def max_logits(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    mods: IndexedMods | None = None,
) -> Tensor:
    """Return the largest score of each head, (H,), as :func:`ringspan.kernels.max_logits.max_logits` does."""
    largest_H = q_BHSD.new_full(q_BHSD.shape[1:2], EMPTY_LSE, dtype=accumulation_dtype(q_BHSD.dtype))
    for block in _blocks(bands, q_BHSD, k_BGTD):
        q, k = q_BHSD[:, :, block.rows], k_BGTD[:, :, block.keys]
        of_block = _attend(q, k, k, block=block, bands=block.bands, scale=scale, mods=mods, reduce=_largest)
        largest_H = torch.maximum(largest_H, of_block)
    return largest_H


class RowBlock(NamedTuple):
    """Some rows, the range of keys that they see, and the bands within this rectangle."""

    rows: slice
    keys: slice
    bands: tuple[Band, ...]
    has_other_parts: bool
    """Whether it has queries or keys of several independent parts (:mod:`ringspan.kernels.containment`)."""


def _blocks(bands: Sequence[Band], q_BHSD: Tensor, k_BGTD: Tensor) -> tuple[RowBlock, ...]:
    """Split the rows into blocks of at most ``MAX_ROWS`` rows and ``MAX_SCORES`` scores."""
    scores_per_row = q_BHSD.shape[0] * q_BHSD.shape[1] * k_BGTD.shape[2]
    return make_row_blocks(tuple(bands), min(MAX_ROWS, max(1, MAX_SCORES // scores_per_row))) if scores_per_row else ()


@cache_by_digest(1024, plain=True)
def make_row_blocks(bands: tuple[Band, ...], rows: int) -> tuple[RowBlock, ...]:
    """Return the blocks of ``rows`` rows that contain all pairs of the bands.

    >>> [(block.rows, block.keys) for block in make_row_blocks((Band(0, 4, 0, 4, -3, 0),), 2)]
    [(slice(0, 2, None), slice(0, 2, None)), (slice(2, 4, None), slice(0, 4, None))]
    """
    all_bands, blocks = tables.table(*bands), []
    if not len(all_bands):
        return ()
    keys = int(all_bands[:, K1].max())
    for start in range(int(all_bands[:, Q0].min()), int(all_bands[:, Q1].max()), rows):
        some = tables.intersect(all_bands, tables.table((start, start + rows, 0, keys, -MAX_LENGTH, MAX_LENGTH)))
        if len(some):
            of_queries = slice(int(some[:, Q0].min()), int(some[:, Q1].max()))
            of_keys = slice(int(some[:, K0].min()), int(some[:, K1].max()))
            of_block = tuple(Band(*row) for row in some.tolist())
            blocks.append(RowBlock(of_queries, of_keys, of_block, not is_one_part(of_block)))
    return tuple(blocks)


def _shares(block: RowBlock, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> Iterable[Share]:
    if not block.has_other_parts:
        return (Share(block.bands),)
    corner = block.rows.start, block.keys.start
    return contained_shares(block.bands, corner=corner, of_queries=of_queries, of_keys=of_keys)


def _attend(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    *learned: Tensor,
    block: RowBlock,
    bands: Sequence[Band],
    scale: float,
    mods: IndexedMods | None,
    reduce: Callable[[Tensor, Tensor], T],
) -> T:
    """Return ``reduce(scores, values)`` of some bands of a block, with operations that autograd records.

    Hidden pairs have the score -inf. ``learned`` replaces the tensors of ``Mods.learned``.
    """
    dtype = accumulation_dtype(k_BGTD.dtype)
    q, k = q_BHSD.to(dtype), k_BGTD.to(dtype)
    score_BHST = (_product(q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2).mT) * scale).flatten(1, 2)
    seen = _seen(block, bands, q.device)
    if mods is not None:
        mods = mods.sliced(block.rows, block.keys)
        # The forward pass substitutes nothing, and a mode would see every operation of the function.
        with enable_function_mode(SubstituteTensors(mods.mods.learned, learned)) if learned else nullcontext():
            score_BHST = mods.apply_score_mod(score_BHST)
        shown = mods.apply_mask_mod(*score_BHST.shape[:2])
        seen = seen if shown is None else seen & shown
    return reduce(score_BHST.to(dtype).masked_fill(~seen, EMPTY_LSE), v_BGTE.to(dtype))


def _seen(block: RowBlock, bands: Sequence[Band], device: torch.device) -> Tensor:
    """Return which pairs of the block the bands contain, (S, T)."""
    rows, keys = block.rows, block.keys
    diagonal = keys.start - rows.start
    corner = np.array([rows.start, rows.start, keys.start, keys.start, diagonal, diagonal])
    shifted = np.array(bands, dtype=np.int64).reshape(-1, 6) - corner
    return copy_to_device(tables.dense(shifted, rows.stop - rows.start, keys.stop - keys.start), device)


def _softmax(score_BHST: Tensor, v_BGTE: Tensor) -> Partial:
    """Return the softmax average of the values. A row of scores -inf has out 0, lse -inf and gradients without NaN."""
    top_BHS1 = score_BHST.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(score_BHST.dtype).min)
    weight_BHST = (score_BHST - top_BHS1).exp()
    total_BHS1 = weight_BHST.sum(-1, keepdim=True)
    empty = total_BHS1 == 0
    total_BHS1 = total_BHS1.masked_fill(empty, 1.0)
    lse_BHS = (top_BHS1 + total_BHS1.log()).masked_fill(empty, EMPTY_LSE).squeeze(-1)
    share_BGRST = (weight_BHST / total_BHS1).unflatten(1, (v_BGTE.shape[1], -1))
    return Partial(_product(share_BGRST, v_BGTE.unsqueeze(2)).flatten(1, 2), lse_BHS)


def _largest(score_BHST: Tensor, v_BGTE: Tensor) -> Tensor:
    """Return the largest score of each head, (H,)."""
    return score_BHST.amax((0, 2, 3))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices in their dtype. Autocast would round them, in the forward pass alone."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
