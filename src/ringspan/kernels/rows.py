"""Copies of rows that lie differently in memory, such as some of the heads of each token.

PyTorch copies them element by element on GPUs, which takes several times as long as the memory needs.

Legend: S rows, B batch, H heads, D width.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from ringspan.kernels.partial import triton_module


def copy_rows_(into_SBHD: Tensor, source_SBHD: Tensor) -> None:
    """Copy rows, converted to the dtype of ``into``."""
    fused = sums_kernel_for(into_SBHD)
    if fused is None or not (into_SBHD.dtype.is_floating_point and source_SBHD.dtype.is_floating_point):
        into_SBHD.copy_(source_SBHD)
    else:
        fused.copy_rows_(into_SBHD, source_SBHD)


def sums_kernel_for(into_SBHD: Tensor) -> ModuleType | None:
    """Return the kernels of :mod:`ringspan.kernels.fused_sums` if they can write to this tensor."""
    if not into_SBHD.is_cuda or into_SBHD.ndim != 4 or into_SBHD.stride(-1) != 1:
        return None
    fused = triton_module("fused_sums")
    return fused if fused is not None and into_SBHD.shape[-1] <= fused.MAX_WIDTH else None
