"""Partial results of attention over different keys, and how they are merged.

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
    """Attention of some queries over some keys: the softmax average of values, and the log of the sum of exponentials.

    A query that sees none of these keys has ``out = 0`` and ``lse = -inf``.
    """

    out: Tensor  # (..., E)
    lse: Tensor  # (...)


def finite_lse(lse: Tensor) -> Tensor:
    """Return lse with 0 for rows that see no key, contiguous, as memory-efficient attention requires.

    Such rows are in no band and their gradient is 0, but a kernel may still compute ``exp(score - lse)`` for them.
    """
    return torch.nan_to_num(lse.contiguous(), nan=torch.nan, posinf=torch.inf, neginf=0.0)


def share_of_keys(lse: Tensor, sink: Tensor) -> Tensor:
    """Return ``exp(lse) / (exp(lse) + exp(sink))``; 0 for rows that see no key, also without a sink (-inf)."""
    return (lse - sink).masked_fill(lse == EMPTY_LSE, EMPTY_LSE).sigmoid()


def merge(a: Partial, b: Partial) -> Partial:
    """Return the partial result over the keys of both. It is exact when either or both are empty."""
    merged = Partial(*(x.clone(memory_format=torch.contiguous_format) for x in a))
    merge_(merged, b)
    return merged


@cache_by_digest(4, plain=True)
def triton_module(name: str) -> ModuleType | None:
    """Import a module of Triton kernels, which run on CUDA devices. Return None if Triton is not installed."""
    return import_module(f"ringspan.kernels.{name}") if find_spec("triton") is not None else None


def merge_(into: Partial, other: Partial, *, old: Tensor | None = None) -> None:
    """Merge ``other`` into ``into`` in place.

    Either out may be narrower than lse. ``into.lse`` may be wider than ``other.lse``, in whose dtype outputs are
    merged.

    ``old`` is read in place of ``into.out``, which is then only written.
    """
    old = into.out if old is None else old
    if into.out.is_cuda and into.lse.ndim == 3 and (fused := triton_module("fused")) is not None:
        fused.merge_(into.out, into.lse, other.out, other.lse, old)
        return
    # The weight of b is e^b / (e^a + e^b) = sigmoid(b - a): 1 where a is empty, 0 where b is. Where both are empty, b -
    # a is NaN, and the weight is set to 0. lerp is exact at both ends.
    share = torch.sigmoid(other.lse - into.lse).masked_fill_(other.lse == EMPTY_LSE, 0.0)
    dtype = other.lse.dtype
    into.out.copy_(torch.lerp(old.to(dtype), other.out.to(dtype), share.to(dtype).unsqueeze(-1)))
    into.lse.copy_(torch.logaddexp(into.lse, other.lse))
