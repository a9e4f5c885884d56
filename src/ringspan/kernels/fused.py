"""The merge as one Triton kernel: reads both parts once, writes the result in place. For CUDA tensors.

Legend: S queries, B batch, H query heads, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16

# Addresses that are multiples of so many bytes Triton takes for round, and loads from them in words.
ALIGNED = 16


class Launch(NamedTuple):
    """A compiled program for a grid, and what it takes beside tensors."""

    launch: Callable[..., Any]
    numbers: tuple[int, ...]


# Kinds of merges: shapes × strides. Packed documents bring new ones all the time.
REMEMBERED = 1024
_programs: dict[Hashable, Launch] = {}


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out, lse, new_out, new_lse, old_out, count, batch, heads,
    out_s, out_b, out_h, lse_s, lse_b, lse_h,
    new_s, new_b, new_h, new_lse_s, new_lse_b, new_lse_h, old_s, old_b, old_h,
    E: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < count
    # A part may have more than 2³¹ elements.
    h = (row % heads).to(tl.int64)
    b = ((row // heads) % batch).to(tl.int64)
    s = (row // (heads * batch)).to(tl.int64)
    a_at = lse + s * lse_s + b * lse_b + h * lse_h
    a = tl.load(a_at, mask=here, other=float("-inf"))
    c = tl.load(new_lse + s * new_lse_s + b * new_lse_b + h * new_lse_h, mask=here, other=float("-inf")).to(a.dtype)
    top = tl.maximum(a, c)
    # Two empty rows have no top to subtract; with 0 in its place both weights are exp(-inf) = 0.
    top = tl.where(top == float("-inf"), 0.0, top)
    old_weight, new_weight = tl.exp(a - top), tl.exp(c - top)
    total = old_weight + new_weight
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    share = new_weight / total
    e = tl.arange(0, WIDTH)
    inside = here[:, None] & (e < E)[None, :]
    out_at = out + (s * out_s + b * out_b + h * out_h)[:, None] + e[None, :]
    wide = a.dtype
    old = tl.load(old_out + (s * old_s + b * old_b + h * old_h)[:, None] + e[None, :], mask=inside, other=0.0).to(wide)
    new = tl.load(new_out + (s * new_s + b * new_b + h * new_h)[:, None] + e[None, :], mask=inside, other=0.0).to(wide)
    # As torch.lerp does it: exact at both ends.
    w = share[:, None]
    merged = tl.where(w < 0.5, old + w * (new - old), new - (new - old) * (1.0 - w))
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(a_at, tl.where(empty, float("-inf"), top + tl.log(total)), mask=here)


def merge_(out_SBHE: Tensor, lse_SBH: Tensor, new_out_SBHE: Tensor, new_lse_SBH: Tensor, old_SBHE: Tensor) -> None:
    """Merge the new part with the old one, which may be out itself, into out and lse. Each out may be narrower than lse."""
    if not lse_SBH.numel():
        return
    new_out_SBHE, old_SBHE = (x if x.stride(-1) == 1 else x.contiguous() for x in (new_out_SBHE, old_SBHE))
    tensors = (out_SBHE, lse_SBH, new_out_SBHE, new_lse_SBH, old_SBHE)
    strides = tuple(x.stride() for x in tensors)
    # Triton compiles for what these are, and whether addresses are round; to find out which program that is takes it longer
    # than the launch.
    aligned = tuple(x.data_ptr() % ALIGNED == 0 for x in tensors)
    kind = (out_SBHE.device, *(x.dtype for x in tensors), out_SBHE.shape, *strides, aligned)
    with torch.cuda.device_of(out_SBHE):  # Triton launches on the current device, which need not be theirs
        known = _programs.get(kind)
        if known is not None:
            known.launch(*tensors, *known.numbers)
            return
        _, batch, heads, e = out_SBHE.shape
        grid = (triton.cdiv(lse_SBH.numel(), BLOCK), 1, 1)
        numbers = (lse_SBH.numel(), batch, heads, *(n for of_one in strides for n in of_one[:3]))
        sizes = (e, triton.next_power_of_2(e), BLOCK)
        program = _merge[grid](*tensors, *numbers, *sizes)
        if program is not None:  # Triton's interpreter has none
            if len(_programs) >= REMEMBERED:
                _programs.clear()
            _programs[kind] = Launch(program[grid], (*numbers, *sizes))
