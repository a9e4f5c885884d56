"""The largest logit of each head, for QK-clip: a pass of its own over the same bands.

A logit is the score of a visible pair after the scale and ``score_mod``, before the softmax. Fused kernels keep only
the largest logit of the rows that they are computing, and return none of them. lse is no substitute: it is larger than
the largest logit, by up to the log of the number of keys. So the products of queries and keys are computed again. This
costs less than half of a forward pass, only if it is asked for, and the kernel of the pass is not changed: its
results and gradients have the same bits with and without the largest logits.

    =========================  =======================================================================
    functions of the user      flex and flex_flash: FlexAttention; eager: the eager kernel
    none, CUDA                 one Triton launch for all bands (:mod:`ringspan.kernels.fused_logits`)
    none, otherwise            the eager kernel, block of rows by block of rows
    =========================  =======================================================================

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

from ringspan.caching.by_digest import cache_by_digest
from ringspan.kernels import eager
from ringspan.kernels.kernel import Kernel
from ringspan.kernels.mods import IndexedMods
from ringspan.masks import Band


def max_logits(
    kernel: Kernel,
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    mods: IndexedMods | None = None,
) -> Tensor:
    """Return the largest logit of each query head over all batch rows and all pairs of the bands: (H,), at least
    float32.

    A head without a visible pair has -inf. If a logit is NaN, so is the largest.
    """
    if mods is None:
        fused = _triton_kernel() if q_BHSD.is_cuda else None
        if fused is not None and fused.supports(q_BHSD):
            found: Tensor = fused.max_logits(q_BHSD, k_BGTD, bands, scale=scale)
            return found
        return eager.max_logits(q_BHSD, k_BGTD, bands, scale=scale)
    compute = getattr(kernel, "max_logits", eager.max_logits)
    largest_H: Tensor = compute(q_BHSD, k_BGTD, bands, scale=scale, mods=mods)
    return largest_H


@cache_by_digest(1, plain=True)
def _triton_kernel() -> ModuleType | None:
    return import_module("ringspan.kernels.fused_logits") if find_spec("triton") is not None else None
