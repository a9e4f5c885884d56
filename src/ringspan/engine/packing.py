"""Pack rows for a message: keys with their values, and queries with all that their gradients need.

::

    | k  D elements | v  E |                              forward and backward
    | q  D elements | dout  E | out  E | … | lse | dlse |  backward, if queries move
    | dout  E | … | dlse |                                 backward, if queries are kept where they are computed

Legend: S queries, T keys, B batch, H query heads, G key heads, D head dim, E value dim, W elements of a packed query.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.kernels import accumulation_dtype
from ringspan.kernels.rows import copy_rows_
from ringspan.plans.shape import saved_bytes, upstream_bytes

# Inputs usually have the tokens of a head contiguous, not the heads of a token, so that packing copies short pieces.
# torch.cat copies them element by element. 16-byte elements are eight times fewer than those of half precision.
WORD = torch.complex128


def pack_kv(k_TBGD: Tensor, v_TBGE: Tensor) -> Tensor:
    """Return a contiguous ``torch.cat([k, v], dim=-1)``. A token is one row, and rows are sent without another copy."""
    if _has_whole_words(k_TBGD) and _has_whole_words(v_TBGE):
        packed = torch.cat((k_TBGD.view(WORD), v_TBGE.view(WORD)), dim=-1).contiguous()
        return packed.view(k_TBGD.dtype)
    return torch.cat((k_TBGD, v_TBGE), dim=-1).contiguous()  # cat keeps the strides of its inputs if they are equal


def _has_whole_words(x: Tensor) -> bool:
    """Return whether every row consists of whole words at aligned addresses, on a device that can copy such words."""
    if x.device.type not in ("cpu", "cuda"):
        return False
    *strides, last = x.stride()
    offsets = x.shape[-1] | int(x.storage_offset())
    for stride in strides:
        offsets |= stride  # the bitwise or is a multiple of a power of two if all operands are
    return last == 1 and offsets % (WORD.itemsize // x.element_size()) == 0 and x.data_ptr() % WORD.itemsize == 0


class SavedRows(NamedTuple):
    """What kernels get as :class:`ringspan.kernels.Saved`, rows first."""

    q_SBHD: Tensor
    dout_SBHE: Tensor
    out_SBHE: Tensor
    lse_SBH: Tensor
    dlse_SBH: Tensor | None


def pack_saved(saved: SavedRows) -> Tensor:
    """Pack one row (W) for each query and head, in the dtype of the queries: (S, B, H, W).

    lse and dlse are at least float32: in half precision each takes the place of two elements. They are at the end of a
    row whose length is a multiple of 16 bytes, so that they are aligned, and q, dout and out can be read in place.
    """
    q, dout, out, lse, dlse = saved
    d, e = q.shape[-1], out.shape[-1]
    rows = q.new_empty((*q.shape[:-1], saved_bytes(d, e, q.element_size()) // q.element_size()))
    if rows.is_meta:  # the rank's own queries, which nothing reads
        return rows
    rows[..., d + 2 * e :].zero_()
    for view, values in zip(unpack_saved(rows, d, e), (q, dout, out, lse, dlse), strict=True):
        if values is not None:
            assert view is not None
            view.copy_(values)
    return rows


def pack_upstream(dout_SBHE: Tensor, dlse_SBH: Tensor | None) -> Tensor:
    """Pack dout and dlse of each query and head into one row (W), as :func:`pack_saved` does: (S, B, H, W)."""
    e = dout_SBHE.shape[-1]
    rows = dout_SBHE.new_empty((*dout_SBHE.shape[:-1], upstream_bytes(e, dout_SBHE.element_size()) // dout_SBHE.element_size()))
    rows[..., e:].zero_()
    dout, dlse = unpack_upstream(rows, e)
    copy_rows_(dout, dout_SBHE)
    if dlse_SBH is not None:
        dlse.copy_(dlse_SBH)
    return rows


def unpack_upstream(rows_SBHW: Tensor, e: int) -> tuple[Tensor, Tensor]:
    """Return views of dout and dlse in packed rows, rows first."""
    dtype = accumulation_dtype(rows_SBHW.dtype)
    tail = torch.finfo(dtype).bits // torch.finfo(rows_SBHW.dtype).bits
    return rows_SBHW[..., :e], rows_SBHW[..., rows_SBHW.shape[-1] - tail :].view(dtype).squeeze(-1)


def unpack_saved(rows_SBHW: Tensor, d: int, e: int) -> SavedRows:
    """Return views of the tensors in packed rows."""
    dtype = accumulation_dtype(rows_SBHW.dtype)
    tail = 2 * torch.finfo(dtype).bits // torch.finfo(rows_SBHW.dtype).bits
    q, dout, out, rest = rows_SBHW.split([d, e, e, rows_SBHW.shape[-1] - d - 2 * e], dim=-1)
    lse, dlse = rest[..., rest.shape[-1] - tail :].view(dtype).unbind(-1)
    return SavedRows(q, dout, out, lse, dlse)
