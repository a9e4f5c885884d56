"""A Triton kernel that adds many gradients in one pass over memory, on CUDA devices.

A rank receives the gradients of its keys from all ranks that have used them. PyTorch adds two tensors at a time, so n
messages are n passes over the sum, each of which reads and writes it. Here each message is read once, and the sum is
written once, in its final dtype.

Legend: S rows, B batch, H heads, D width of a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.fused import BLOCK, launch_rows, power_of_2, with_contiguous_rows

MAX_TERMS = 9  # of one launch: the sum so far, and the messages of a rank's peers in a node of 8, and one more
MAX_WIDTH = 512  # a program holds whole rows

# The dtype in which a program computes. A copy without conversion keeps the bits of packed rows, whose elements of half
# precision may be halves of a float32: converting one that looks like a NaN would change it.
FLOAT32, FLOAT64, UNCHANGED = 0, 1, 2


@triton.jit
def _load(x, s, b, h, x_s, x_b, x_h, at, inside, MODE: tl.constexpr):  # type: ignore[no-untyped-def]
    found = tl.load(x + (s * x_s + b * x_b + h * x_h)[:, None] + at, mask=inside, other=0.0)
    if MODE == 0:
        found = found.to(tl.float32)
    elif MODE == 1:
        found = found.to(tl.float64)
    return found


@triton.jit
def _write_sum(  # type: ignore[no-untyped-def]
    into, x0, x1, x2, x3, x4, x5, x6, x7, x8, count, batch, heads,
    into_s, into_b, into_h, s0, b0, h0, s1, b1, h1, s2, b2, h2, s3, b3, h3, s4, b4, h4,
    s5, b5, h5, s6, b6, h6, s7, b7, h7, s8, b8, h8,
    D: tl.constexpr, WIDTH: tl.constexpr, TERMS: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A tensor may have more than 2³¹ elements.
    h = (row % heads).to(tl.int64)
    b = ((row // heads) % batch).to(tl.int64)
    s = (row // (heads * batch)).to(tl.int64)
    at = tl.arange(0, WIDTH)[None, :]
    inside = (row < count)[:, None] & (at < D)
    total = _load(x0, s, b, h, s0, b0, h0, at, inside, MODE)
    if TERMS > 1:
        total += _load(x1, s, b, h, s1, b1, h1, at, inside, MODE)
    if TERMS > 2:
        total += _load(x2, s, b, h, s2, b2, h2, at, inside, MODE)
    if TERMS > 3:
        total += _load(x3, s, b, h, s3, b3, h3, at, inside, MODE)
    if TERMS > 4:
        total += _load(x4, s, b, h, s4, b4, h4, at, inside, MODE)
    if TERMS > 5:
        total += _load(x5, s, b, h, s5, b5, h5, at, inside, MODE)
    if TERMS > 6:
        total += _load(x6, s, b, h, s6, b6, h6, at, inside, MODE)
    if TERMS > 7:
        total += _load(x7, s, b, h, s7, b7, h7, at, inside, MODE)
    if TERMS > 8:
        total += _load(x8, s, b, h, s8, b8, h8, at, inside, MODE)
    into_at = into + (s * into_s + b * into_b + h * into_h)[:, None] + at
    tl.store(into_at, total.to(into.dtype.element_ty), mask=inside)


def write_sum_(into_SBHD: Tensor, terms_SBHD: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Write the sum of the terms, added from the first to the last in ``dtype`` and rounded once.

    ``dtype`` is float32 or float64. The first term may be ``into``.
    """
    assert into_SBHD.stride(-1) == 1, "the last dim of the sum must be contiguous"
    d = into_SBHD.shape[-1]
    assert d <= MAX_WIDTH, "a program holds whole rows"
    terms = with_contiguous_rows(*terms_SBHD)
    while True:
        now, terms = terms[:MAX_TERMS], terms[MAX_TERMS:]
        # The sum of some terms must not be rounded.
        to = into_SBHD if not terms or into_SBHD.dtype == dtype else torch.empty_like(into_SBHD, dtype=dtype)
        sizes = (d, power_of_2(d), len(now), FLOAT64 if dtype == torch.float64 else FLOAT32, BLOCK)
        unused: list[Any] = [now[0]] * (MAX_TERMS - len(now))
        launch_rows(_write_sum, (to, *now, *unused), into_SBHD.shape[:3], sizes)
        if not terms:
            return
        terms = [to, *terms]


def copy_rows_(into_SBHD: Tensor, source_SBHD: Tensor) -> None:
    """Copy rows, converted to the dtype of ``into``."""
    assert into_SBHD.stride(-1) == 1, "the last dim of the copy must be contiguous"
    (source,) = with_contiguous_rows(source_SBHD)
    d, dtypes = into_SBHD.shape[-1], (into_SBHD.dtype, source.dtype)
    mode = UNCHANGED if dtypes[0] == dtypes[1] else FLOAT64 if torch.float64 in dtypes else FLOAT32
    sizes = (d, power_of_2(d), 1, mode, BLOCK)
    launch_rows(_write_sum, (into_SBHD, *[source] * MAX_TERMS), into_SBHD.shape[:3], sizes)
