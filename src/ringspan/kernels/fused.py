"""Triton kernels for the work between calls of attention on CUDA devices. Each reads and writes every element once.

:func:`merge_` merges two partial results. :func:`write_side_by_side_` writes the gradients of keys and of values into
one buffer, side by side, or adds them to what it holds.

Legend: S queries, T keys, B batch, H query heads, G key heads, D head dim, E value dim; F = D + E.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.caching.registry import on_clear_caches
from ringspan.kernels.launches import launch, note_launch

BLOCK = 16

# Triton compiles vector loads for addresses that are multiples of this many bytes.
ALIGNMENT = 16


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out, lse, new_out, new_lse, old_out, count, batch, heads,
    out_s, out_b, out_h, lse_s, lse_b, lse_h,
    new_s, new_b, new_h, new_lse_s, new_lse_b, new_lse_h, old_s, old_b, old_h,
    E: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < count
    # A tensor may have more than 2³¹ elements.
    h = (row % heads).to(tl.int64)
    b = ((row // heads) % batch).to(tl.int64)
    s = (row // (heads * batch)).to(tl.int64)
    a_at = lse + s * lse_s + b * lse_b + h * lse_h
    a = tl.load(a_at, mask=here, other=float("-inf"))
    c = tl.load(new_lse + s * new_lse_s + b * new_lse_b + h * new_lse_h, mask=here, other=float("-inf")).to(a.dtype)
    top = tl.maximum(a, c)
    # If both rows are empty the maximum is -inf, and -inf + inf is NaN. With 0 in its place both weights are exp(-inf)
    # = 0.
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
    # The formula of torch.lerp: exact at both ends.
    w = share[:, None]
    merged = tl.where(w < 0.5, old + w * (new - old), new - (new - old) * (1.0 - w))
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(a_at, tl.where(empty, float("-inf"), top + tl.log(total)), mask=here)


def merge_(out_SBHE: Tensor, lse_SBH: Tensor, new_out_SBHE: Tensor, new_lse_SBH: Tensor, old_SBHE: Tensor) -> None:
    """Merge a new partial result with the old one into out and lse.

    ``old`` may be out. Any out may be narrower than lse.
    """
    assert out_SBHE.stride(-1) == 1, "the last dim of out must be contiguous"
    new_out_SBHE, old_SBHE = with_contiguous_rows(new_out_SBHE, old_SBHE)
    e = out_SBHE.shape[-1]
    launch_rows(_merge, (out_SBHE, lse_SBH, new_out_SBHE, new_lse_SBH, old_SBHE), lse_SBH.shape, (e, power_of_2(e), BLOCK))


@triton.jit
def _write_side_by_side(  # type: ignore[no-untyped-def]
    both, dk, dv, count, batch, heads,
    both_t, both_b, both_g, dk_t, dk_b, dk_g, dv_t, dv_b, dv_g,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = (row % heads).to(tl.int64)
    b = ((row // heads) % batch).to(tl.int64)
    t = (row // (heads * batch)).to(tl.int64)
    at = tl.arange(0, WIDTH)[None, :]
    here = (row < count)[:, None]
    k_at = both + (t * both_t + b * both_b + g * both_g)[:, None] + at
    v_at = k_at + D
    wide = both.dtype.element_ty
    k = tl.load(dk + (t * dk_t + b * dk_b + g * dk_g)[:, None] + at, mask=here & (at < D), other=0.0).to(wide)
    v = tl.load(dv + (t * dv_t + b * dv_b + g * dv_g)[:, None] + at, mask=here & (at < E), other=0.0).to(wide)
    if ADD:
        k += tl.load(k_at, mask=here & (at < D), other=0.0)
        v += tl.load(v_at, mask=here & (at < E), other=0.0)
    tl.store(k_at, k, mask=here & (at < D))
    tl.store(v_at, v, mask=here & (at < E))


def write_side_by_side_(both_TBGF: Tensor, dk_TBGD: Tensor, dv_TBGE: Tensor, *, add: bool) -> None:
    """Write both gradients side by side into one buffer, or add them to what it holds."""
    dk_TBGD, dv_TBGE = with_contiguous_rows(dk_TBGD, dv_TBGE)
    d, e = dk_TBGD.shape[-1], dv_TBGE.shape[-1]
    sizes = (d, e, power_of_2(max(d, e)), add, BLOCK)
    launch_rows(_write_side_by_side, (both_TBGF, dk_TBGD, dv_TBGE), both_TBGF.shape[:3], sizes)


def with_contiguous_rows(*tensors: Tensor) -> list[Tensor]:
    """Copy the tensors whose last dim is not contiguous."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class TritonLaunch(NamedTuple):
    """A compiled program with its grid, and the integer arguments that follow the tensors."""

    launch: Callable[..., Any]
    integers: tuple[int, ...]


# Launches differ by shapes and strides. Every packed batch of documents has new ones.
MAX_CACHED = 1024
_launches: dict[Hashable, TritonLaunch] = {}
on_clear_caches(_launches.clear)


def launch_rows(kernel: Any, tensors: tuple[Tensor, ...], rows: torch.Size, sizes: tuple[int, ...]) -> None:
    """Run a kernel on all rows of these three dims. It takes the tensors, the number of rows, the last two dims, the
    strides of all tensors but for their last dim, and ``sizes``.

    Triton needs longer to look up the compiled program than to launch it, so the program is cached here.
    """
    count = rows.numel()
    if not count:
        return
    strides = tuple([x.stride() for x in tensors])
    # Triton compiles one program for each combination of these, and of aligned addresses.
    aligned = tuple([x.data_ptr() % ALIGNMENT == 0 for x in tensors])
    key = (kernel, tensors[0].device, rows, sizes, strides, aligned, *[x.dtype for x in tensors])
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, which may be another one
        cached = _launches.get(key)
        if cached is not None:
            launch(cached.launch, *tensors, *cached.integers)
            return
        grid = (triton.cdiv(count, BLOCK), 1, 1)
        integers = (count, *rows[1:], *(n for stride in strides for n in stride[:3]), *sizes)
        program = kernel[grid](*tensors, *integers)
        note_launch(kernel[grid] if program is None else program[grid], *tensors, *integers)
        if program is not None:  # Triton's interpreter returns None
            if len(_launches) >= MAX_CACHED:
                _launches.clear()
            _launches[key] = TritonLaunch(program[grid], integers)
