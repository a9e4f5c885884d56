"""The loop over calls (:mod:`ringspan.kernels.sdpa_calls`) that the kernels cudnn, efficient and cpu share.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.caching.by_stream import cache_by_stream, copy_to_device
from ringspan.kernels.containment import Share, contained_shares
from ringspan.kernels.kernel import Gradients, PartialRows, Saved, with_dlse_column
from ringspan.kernels.partial import EMPTY_LSE, Partial, finite_lse
from ringspan.kernels.sdpa_calls import RectangleCall, make_sdpa_calls
from ringspan.masks import Band
from ringspan.masks import table as tables

# (q_BHSD, k_BGTD, v_BGTD, mask_BHST, is_causal, scale) -> (out_BHSD, lse_BHS)
Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
# (dout_BHSD, q_BHSD, k_BGTD, v_BGTD, out_BHSD, lse_BHS, mask_BHST, is_causal, scale) -> (dq_BHSD, dk_BGTD, dv_BGTD)
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaKernel:
    """Forward and backward of one of PyTorch's fused kernels, and the dtype and dims that they take."""

    forward: Forward
    backward: Backward
    compute_dtype: Callable[[torch.dtype], torch.dtype] = lambda given: given
    """The dtype in which inputs of a dtype are computed."""
    dim_multiple: int = 1
    """Head dim and value dim are padded with zeros to the same multiple of this."""

    def attend(
        self, q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float
    ) -> Iterator[PartialRows]:
        dtype = self.compute_dtype(k_BGTD.dtype)
        for call in make_sdpa_calls(tuple(bands), k_BGTD.device.type == "cpu"):
            operands = self._operands(q_BHSD, k_BGTD, v_BGTE, call, dtype)
            for share in _shares(call, operands[:1], operands[1:]):
                q, k, v = operands
                if share.queries_S is not None:
                    q, k, v = share.of_queries(q), share.of_keys(k), share.of_keys(v)
                mask, blind_S = _mask(call, share.bands, q)
                out, lse = self.forward(q, k, v, mask, call.is_causal, scale)
                if blind_S is not None:
                    # For a row without keys PyTorch returns NaN, or lse 0; here it is out 0 and lse -inf.
                    out, lse = out.masked_fill(blind_S.unsqueeze(-1), 0.0), lse.masked_fill(blind_S, EMPTY_LSE)
                yield PartialRows(call.q0, call.q1, Partial(out[..., : v_BGTE.shape[-1]], lse))

    def attend_backward(
        self, saved: Saved, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float
    ) -> Iterator[Gradients]:
        dtype = self.compute_dtype(k_BGTD.dtype)
        for call in make_sdpa_calls(tuple(bands), k_BGTD.device.type == "cpu"):
            rows = saved.rows(call.q0, call.q1)
            dout, out, values = rows.dout_BHSE, rows.out_BHSE, v_BGTE
            if rows.dlse_BHS is not None and _may_be_nonzero(rows.dlse_BHS):
                dout, out, values = with_dlse_column(dout, out, v_BGTE, rows.dlse_BHS)
            q, k, v = self._operands(saved.q_BHSD, k_BGTD, values, call, dtype)
            dout, out = dout.to(dtype), out.to(dtype)
            if dout.shape[-1] < q.shape[-1]:
                dout, out = _padded(dout, q.shape[-1]), _padded(out, q.shape[-1])
            of_queries, of_keys = (dout, q, out, finite_lse(rows.lse_BHS)), (k, v)
            for share in _shares(call, of_queries, of_keys):
                (dout, q, out, lse), (k, v) = of_queries, of_keys
                if share.queries_S is not None:
                    (dout, q, out, lse), (k, v) = map(share.of_queries, of_queries), map(share.of_keys, of_keys)
                mask, _ = _mask(call, share.bands, q)
                dq, dk, dv = self.backward(dout, q, k, v, out, lse, mask, call.is_causal, scale)
                dq, dk, dv = dq[..., : saved.q_BHSD.shape[-1]], dk[..., : k_BGTD.shape[-1]], dv[..., : v_BGTE.shape[-1]]
                if share.queries_S is not None:
                    dq, dk, dv = share.of_queries(dq), share.of_keys(dk), share.of_keys(dv)
                yield Gradients(slice(call.q0, call.q1), dq, slice(call.k0, call.k1), dk, dv)

    def _operands(
        self, q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, call: RectangleCall, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of the rectangle in this dtype, with all dims padded to one width."""
        width = max(q_BHSD.shape[-1], v_BGTE.shape[-1])
        width += -width % self.dim_multiple
        q = q_BHSD[:, :, call.q0 : call.q1].to(dtype)
        k = k_BGTD[:, :, call.k0 : call.k1].to(dtype)
        v = v_BGTE[:, :, call.k0 : call.k1].to(dtype)
        if not q.shape[-1] == v.shape[-1] == width:
            q, k, v = _padded(q, width), _padded(k, width), _padded(v, width)
        return q, k, v


def _may_be_nonzero(dlse: Tensor) -> bool:
    """Return whether a gradient of lse must be passed to the kernel. Queries that moved have one, often all zeros.

    Its additional column makes rows wider. A product of matrices of another width rounds scores differently from the
    forward pass, and then the rounding errors of ``score - lse`` no longer cancel. On other devices than CPUs the
    values are not read, because the host would wait for the device.
    """
    return dlse.device.type != "cpu" or bool(dlse.any())


def _padded(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _shares(call: RectangleCall, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> Iterable[Share]:
    if not call.has_other_parts:
        return (Share(call.bands),)
    return contained_shares(call.bands, corner=(call.q0, call.k0), of_queries=of_queries, of_keys=of_keys)


def _mask(call: RectangleCall, bands: tuple[Band, ...], like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return bands as an additive mask of the rectangle of the call, and its rows without keys. None: all is
    visible."""
    if not call.bands:
        return None, None
    is_small = (call.q1 - call.q0) * (call.k1 - call.k0) <= MAX_CACHED_CELLS
    # A CUDA graph cannot capture the copy of a mask, and must not depend on whether one is cached.
    make = _small_mask if is_small and like.device.type == "cpu" else _make_mask
    mask_ST, blind_S = make(call[:4], bands, like.dtype, like.device)
    return mask_ST.expand(*like.shape[:2], -1, -1), blind_S


def _make_mask(
    rectangle: tuple[int, int, int, int], bands: tuple[Band, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the mask (S, T) and which rows have no key. Rows are 16-byte aligned, as GPU kernels require."""
    q0, q1, k0, k1 = rectangle
    shifted = tables.table(*(band.shifted(-q0, -k0) for band in bands))
    seen = copy_to_device(tables.dense(shifted, q1 - q0, k1 - k0), device)
    rows, cols = seen.shape
    mask_ST = torch.zeros((rows, cols + -cols % 16), dtype=dtype, device=device)[:, :cols].masked_fill_(~seen, EMPTY_LSE)
    return mask_ST, ~seen.any(-1)


# Making a small mask takes longer than the call. 256 masks of float64 need 32 MB at most.
MAX_CACHED_CELLS = 2**14
_small_mask = cache_by_stream(256)(_make_mask)
