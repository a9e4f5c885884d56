"""What flash-attention's own kernels have in common: a tight band is exactly one of their calls.

Their window is counted from the bottom right corner: query ``i`` of S sees key ``j`` of T iff
``-left <= j - i - (T - S) <= right``. In a tight band both corners of the diagonal lie inside the rectangle, so that left and
right are never negative and any band is one launch: rectangle, triangle, window or trapezoid.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ringspan.kernels.kernel import Part, Saved
from ringspan.kernels.partial import EMPTY_LSE, Partial
from ringspan.masks import Band


class Window(NamedTuple):
    """A band as flash attention says it; None is no limit on that side."""

    left: int | None
    right: int | None

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0


def window(band: Band) -> Window:
    """The window of a tight band.

    >>> window(Band(0, 4, 0, 4, -3, 0)), window(Band(0, 2, 0, 4, -1, 3)), window(Band(0, 3, 2, 6, 1, 3))
    (Window(left=None, right=0), Window(left=None, right=None), Window(left=2, right=0))
    """
    corner = (band.k1 - band.q1) if band.rows and band.cols else 0
    left = corner - band.lo if band.cut_below else None
    right = band.hi - corner if band.cut_above else None
    return Window(left, right)


# (q_BSHD, k_BTGD, v_BTGE, window, scale) -> (out_BSHE, lse_BHS)
Forward = Callable[[Tensor, Tensor, Tensor, Window, float], tuple[Tensor, Tensor]]
# (saved with BSH… tensors, k_BTGD, v_BTGE, window, scale) -> (dq_BSHD, dk_BTGD, dv_BTGE)
Backward = Callable[[Saved, Tensor, Tensor, Window, float], tuple[Tensor, Tensor, Tensor]]


def attend(
    forward: Forward, q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float
) -> Iterator[Part]:
    q, k, v = (x.transpose(1, 2) for x in (q_BHSD, k_BGTD, v_BGTE))
    for band in bands:
        keys = slice(band.k0, band.k1)
        out, lse = forward(q[:, band.q0 : band.q1], k[:, keys], v[:, keys], window(band), scale)
        yield Part(band.q0, band.q1, Partial(out.transpose(1, 2), lse))


def attend_backward(
    backward: Backward,
    saved: Saved,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    dq_BHSD: Tensor,
    dk_BGTD: Tensor,
    dv_BGTE: Tensor,
) -> None:
    # A row that sees nothing has lse -inf and no part in any band; the kernels must not meet exp(x + inf) all the same.
    lse = saved.lse_BHS.masked_fill(saved.lse_BHS == EMPTY_LSE, 0.0)
    q, dout, out = (x.transpose(1, 2) for x in saved[:3])
    k, v = k_BGTD.transpose(1, 2), v_BGTE.transpose(1, 2)
    for band in bands:
        rows, keys = slice(band.q0, band.q1), slice(band.k0, band.k1)
        dlse = None if saved.dlse_BHS is None else saved.dlse_BHS[:, :, rows]
        part = Saved(q[:, rows], dout[:, rows], out[:, rows], lse[:, :, rows], dlse)
        dq, dk, dv = backward(part, k[:, keys], v[:, keys], window(band), scale)
        dq_BHSD[:, :, rows] += dq.transpose(1, 2)
        dk_BGTD[:, :, keys] += dk.transpose(1, 2)
        dv_BGTE[:, :, keys] += dv.transpose(1, 2)
