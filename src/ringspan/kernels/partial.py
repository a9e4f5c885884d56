"""Partial results of attention, and the one way they are put together.

Legend: B batch, H query heads, S queries, E value dim.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.caching.by_digest import cache_by_digest

EMPTY_LSE = float("-inf")


class Partial(NamedTuple):
    """What some keys contribute to the output of some queries: their softmax average and the log of the sum of exponentials.

    A query that saw none of the keys has ``out = 0`` and ``lse = -inf``. Both tensors are at least float32.
    """

    out: Tensor  # (..., E)
    lse: Tensor  # (...)


def finite_lse(lse: Tensor) -> Tensor:
    """With 0 for rows that see nothing: they have no part in any band, but kernels must not meet exp(x + inf) all the same.

    Contiguous, as memory-efficient attention wants it.
    """
    return torch.nan_to_num(lse.contiguous(), nan=torch.nan, posinf=torch.inf, neginf=0.0)


def merge(a: Partial, b: Partial) -> Partial:
    """The partial result over the keys of both. Exact when either or both are empty."""
    merged = Partial(*(x.clone(memory_format=torch.contiguous_format) for x in a))
    merge_(merged, b)
    return merged


@cache_by_digest(1, plain=True)
def triton_kernels() -> ModuleType | None:
    """Those for CUDA devices, if there is a Triton to compile them."""
    return import_module("ringspan.kernels.fused") if find_spec("triton") is not None else None


def merge_(into: Partial, other: Partial, *, old: Tensor | None = None) -> None:
    """:func:`merge`, in place. Each out may be narrower than lse, in which it is computed.

    With ``old``, that is what into's out was so far, and into's own is only written.
    """
    old = into.out if old is None else old
    if into.out.is_cuda and into.lse.ndim == 3 and (fused := triton_kernels()) is not None:
        fused.merge_(into.out, into.lse, other.out, other.lse, old)
        return
    # b's share of the sum is e^b / (e^a + e^b) = sigmoid(b - a): 1 where a is empty, 0 where b is. Where both are it is
    # nobody's, and -inf + inf must not make it nan. lerp is exact at both ends.
    share = torch.sigmoid(other.lse - into.lse).masked_fill_(other.lse == EMPTY_LSE, 0.0)
    dtype = into.lse.dtype
    into.out.copy_(torch.lerp(old.to(dtype), other.out.to(dtype), share.unsqueeze(-1)))
    into.lse.copy_(torch.logaddexp(into.lse, other.lse))
