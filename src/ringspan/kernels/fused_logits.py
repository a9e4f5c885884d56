"""A Triton kernel for the largest logit of each head: one launch for any number of bands.

The rows of a band are cut into tiles of ``ROWS``. A program computes the scores of one tile and one head, some keys at
a time, and stores the largest. The tiles are a table on the device, so documents are data of the launch::

    tile    first row, end of rows, first key, end of keys, lo, hi

Legend: B batch, H query heads, G key heads (G divides H), R = H / G, S queries, T keys, D head dim, N tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.caching.by_stream import cache_by_stream, copy_to_device
from ringspan.kernels.launches import note_launch
from ringspan.masks import Band
from ringspan.masks import table as tables
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1, Ints

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROWS = 128
# A tile of queries and two of keys must fit into shared memory: rows of up to 256 bytes allow tiles of 128 keys, rows
# of up to 512 bytes tiles of 32.
KEYS_BY_ROW_BYTES = {256: 128, 512: 32}
OPTIONS = {"num_warps": 8, "num_stages": 2}


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    q, k, tiles, largest, scale, count, batch, heads, group,
    q_b, q_h, q_s, k_b, k_g, k_t,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Programs of one head follow each other: they read the same keys.
    tile, bh = tl.program_id(0) % count, tl.program_id(0) // count
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    at = tiles + tile * 6
    first_row, row_end, first_key, key_end = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    lo, hi = tl.load(at + 4), tl.load(at + 5)
    s, d = first_row + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_row, is_dim = s < row_end, d < D
    q_at = q + b * q_b + h * q_h + s.to(tl.int64)[:, None] * q_s + d[None, :]
    q_SD = tl.load(q_at, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    first_S, last_S = tl.where(is_row, s + lo, key_end), tl.minimum(s + hi, key_end - 1)
    so_far = tl.full((ROWS, KEYS), float("-inf"), tl.float32)
    for start in range(first_key, key_end, KEYS):
        t = start + tl.arange(0, KEYS)
        k_at = k + b * k_b + (h // group) * k_g + t.to(tl.int64)[None, :] * k_t + d[:, None]
        k_DT = tl.load(k_at, mask=(t < key_end)[None, :] & is_dim[:, None], other=0.0)
        product_ST = tl.dot(q_SD, k_DT, input_precision="ieee")
        seen = (t[None, :] >= first_S[:, None]) & (t[None, :] <= last_S[:, None])
        product_ST = tl.where(seen, product_ST, float("-inf"))
        so_far = tl.maximum(so_far, product_ST, propagate_nan=tl.PropagateNan.ALL)
    # A reduction ignores NaN, so it is counted.
    nans = tl.sum(tl.sum((so_far != so_far).to(tl.int32), 1), 0)
    found = tl.max(tl.max(so_far, 1), 0) * scale
    tl.store(largest + tile * batch * heads + bh, tl.where(nans > 0, float("nan"), found))


def supports(q_BHSD: Tensor) -> bool:
    return q_BHSD.dtype in DTYPES and _width(q_BHSD) * q_BHSD.element_size() <= max(KEYS_BY_ROW_BYTES)


def _width(q_BHSD: Tensor) -> int:
    return max(16, triton.next_power_of_2(q_BHSD.shape[-1]))  # 16 is the smallest tile of tensor cores


def max_logits(q_BHSD: Tensor, k_BGTD: Tensor, bands: Sequence[Band], *, scale: float) -> Tensor:
    """Return the largest score of each head, (H,), as :func:`ringspan.kernels.max_logits.max_logits` does.

    The scale must be positive: the largest product is the largest score.
    """
    (batch, heads, _, dim), kv_heads = q_BHSD.shape, k_BGTD.shape[1]
    tiles_N6 = make_tiles(tuple(bands), q_BHSD.device)
    if not len(tiles_N6) or not batch * heads:
        return q_BHSD.new_full((heads,), -torch.inf, dtype=torch.float32)
    largest_NBH = q_BHSD.new_empty((len(tiles_N6), batch, heads), dtype=torch.float32)
    width = _width(q_BHSD)
    keys = next(keys for size, keys in KEYS_BY_ROW_BYTES.items() if width * q_BHSD.element_size() <= size)
    tensors = q_BHSD, k_BGTD, tiles_N6, largest_NBH
    numbers = scale, len(tiles_N6), batch, heads, heads // kv_heads, *q_BHSD.stride()[:3], *k_BGTD.stride()[:3]
    sizes = *numbers, dim, width, ROWS, keys
    with torch.cuda.device_of(q_BHSD):  # Triton launches on the current device, which may be another one
        launch = _largest[largest_NBH.numel(), 1, 1]  # the other axes of a grid have at most 65,535 programs
        launch(*tensors, *sizes, **OPTIONS)
        note_launch(launch, *tensors, *sizes, **OPTIONS)
    return largest_NBH.amax((0, 1))


@cache_by_stream(1024)
def make_tiles(bands: tuple[Band, ...], device: torch.device) -> Tensor:
    """Return the tiles of the bands on the device, (N, 6)."""
    return copy_to_device(tile_table(tables.table(*bands), ROWS).astype(np.int32), device)


def tile_table(t: tables.Table, rows: int) -> Ints:
    """Cut every band into tiles of at most ``rows`` rows, each with the keys that its rows see.

    >>> tile_table(tables.table((0, 5, 0, 5, -4, 0)), 2).tolist()
    [[0, 2, 0, 2, -4, 0], [2, 4, 0, 4, -4, 0], [4, 5, 0, 5, -4, 0]]
    """
    count = -(-(t[:, Q1] - t[:, Q0]) // rows)
    of_band = t[np.repeat(np.arange(len(t)), count)]
    first = of_band[:, Q0] + tables.ranges(np.zeros_like(count), count) * rows
    end = np.minimum(first + rows, of_band[:, Q1])
    first_key = np.maximum(of_band[:, K0], first + of_band[:, LO])
    key_end = np.minimum(of_band[:, K1], end + of_band[:, HI])
    return np.stack([first, end, first_key, key_end, of_band[:, LO], of_band[:, HI]], axis=1)
