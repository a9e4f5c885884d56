"""Keep NaN and infinities within their document in FlexAttention, whose blocks may have several documents.

The hidden pairs of a block have the weight 0, and 0 times NaN is NaN: a NaN in a key would reach every query of its
block, and in the backward pass a NaN in a query every key. So rows that are not finite are replaced by zeros before the
call, and NaN is written where it belongs afterwards: to the results of such queries and of queries that see such keys,
and to the gradients of all keys that these queries see. Every query sees one interval of keys, so counts find them, and
neither the pairs nor the host are needed::

    key                     0  1  2  3  4      key 2 is not finite
    such keys before it     0  0  0  1  1  1
    a query sees [1, 4)                        1 before 4, 0 before 1: NaN
    a query sees [3, 5)                        1 before 5, 1 before 3: kept

The results of all other queries have the bits that they would have with finite numbers in place of the zeros: hidden
pairs add a zero.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.kernels.kernel import Saved
from ringspan.kernels.partial import Partial


class Intervals(NamedTuple):
    """Query i sees the keys ``start_S[i] <= j < stop_S[i]``, none if both are equal."""

    start_S: Tensor
    stop_S: Tensor

    def see_any(self, keys_BGT: Tensor) -> Tensor:
        """Return which queries (B, G, S) see any of these keys."""
        before = F.pad(keys_BGT.cumsum(-1, dtype=torch.int32), (1, 0))
        return before.index_select(-1, self.stop_S) > before.index_select(-1, self.start_S)

    def seen_by_any(self, queries_BHS: Tensor, keys: int) -> Tensor:
        """Return which of the keys (B, H, T) any of these queries sees."""
        begin_or_end = queries_BHS.new_zeros((*queries_BHS.shape[:2], keys + 1), dtype=torch.int32)
        ones = queries_BHS.to(torch.int32)
        begin_or_end.index_add_(-1, self.start_S, ones).index_add_(-1, self.stop_S, -ones)
        return begin_or_end.cumsum(-1)[..., :keys] > 0


class NonfiniteRows(NamedTuple):
    """The queries and keys of a call that have a value which is not finite, and who sees whom."""

    queries_BHS: Tensor
    keys_BGT: Tensor
    intervals: Intervals

    @staticmethod
    def of_inputs(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, intervals: Intervals) -> NonfiniteRows:
        return NonfiniteRows(_nonfinite(q_BHSD), _nonfinite(k_BGTD, v_BGTE), intervals)

    @staticmethod
    def of_saved(saved: Saved, k_BGTD: Tensor, v_BGTE: Tensor, intervals: Intervals) -> NonfiniteRows:
        queries = _nonfinite(saved.q_BHSD, saved.dout_BHSE, saved.out_BHSE)
        queries |= ~(saved.lse_BHS < torch.inf)  # -inf is the lse of a query that sees nothing
        if saved.dlse_BHS is not None:
            queries |= ~saved.dlse_BHS.isfinite()
        return NonfiniteRows(queries, _nonfinite(k_BGTD, v_BGTE), intervals)

    def zero_queries(self, x: Tensor) -> Tensor:
        """Return a copy of (B, H, S, D) or (B, H, S) with zeros in these queries."""
        return _zeroed(x, self.queries_BHS if x.ndim == 3 else self.queries_BHS.unsqueeze(-1))

    def zero_saved(self, saved: Saved) -> Saved:
        return Saved(*(None if x is None else self.zero_queries(x) for x in saved))  # type: ignore[arg-type]

    def zero_keys(self, k_BGTD: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies with zeros in these keys. Keys and values that are side by side in memory stay so: a program
        was compiled for their strides."""
        zero_BGT1, d = self.keys_BGT.unsqueeze(-1), k_BGTD.shape[-1]
        if v_BGTE.data_ptr() - k_BGTD.data_ptr() != d * k_BGTD.element_size() or k_BGTD.stride() != v_BGTE.stride():
            return _zeroed(k_BGTD, zero_BGT1), _zeroed(v_BGTE, zero_BGT1)
        both_BGTF = k_BGTD.as_strided((*k_BGTD.shape[:3], d + v_BGTE.shape[-1]), k_BGTD.stride())
        both_BGTF = _zeroed(both_BGTF, zero_BGT1)
        return both_BGTF[..., :d], both_BGTF[..., d:]

    @property
    def nan_queries(self) -> Tensor:
        """The queries whose result is NaN: those that are not finite and see a key, and those that see such a key."""
        shared_by = self.queries_BHS.shape[1] // self.keys_BGT.shape[1]
        see_any = self.intervals.see_any(self.keys_BGT).repeat_interleave(shared_by, dim=1)
        return see_any | (self.queries_BHS & (self.intervals.start_S < self.intervals.stop_S))

    def write_to_result(self, result: Partial) -> Partial:
        """Write NaN to the queries that have it."""
        is_nan = self.nan_queries
        return Partial(result.out.masked_fill(is_nan.unsqueeze(-1), torch.nan), result.lse.masked_fill(is_nan, torch.nan))

    def write_to_gradients(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Write NaN to the queries that have it, and to all keys that they see. Of ``dq, dk, dv, *dlearned``, the last
        are sums over all documents: they are NaN if any query is."""
        dq, dk, dv, *dlearned = grads
        queries = self.nan_queries
        seen_BHT = self.intervals.seen_by_any(queries, self.keys_BGT.shape[2])
        keys = seen_BHT.unflatten(1, (self.keys_BGT.shape[1], -1)).any(2)
        of_rows = [x.masked_fill(rows.unsqueeze(-1), torch.nan) for x, rows in ((dq, queries), (dk, keys), (dv, keys))]
        return of_rows + [x.masked_fill(queries.any(), torch.nan) for x in dlearned]


def _nonfinite(*tensors: Tensor) -> Tensor:
    """Return whether a row (B, H, S) of any of the tensors has a value that is not finite: then its sum is not.

    In float64, since finite values of bfloat16 and float32 can have a sum that is infinite in float32.
    """
    first, *others = [~x.sum(-1, dtype=torch.float64).isfinite() for x in tensors]
    for other in others:
        first |= other
    return first


def _zeroed(x: Tensor, zero: Tensor) -> Tensor:
    """Return a copy with zeros where ``zero`` is True, and with the strides of x if it has no gaps."""
    return torch.where(zero, x.new_zeros(()), x.detach(), out=torch.empty_like(x))
