"""What flash-attention's own kernels have in common: a loop over their calls (:mod:`ringspan.kernels.flash_calls`).

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim; N = B × H or B × G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ringspan.kernels.flash_calls import Batch, batches
from ringspan.kernels.kernel import Gradients, Part, Saved
from ringspan.kernels.partial import Partial, finite
from ringspan.masks import Band

# (q_BSHD, k_BTGD, v_BTGE, batch, scale) -> (out_BSHE, lse_BHS)
# and, of several sequences, (q_SND, k_TND, v_TNE, batch, scale) -> (out_SNE, lse_NS)
Forward = Callable[[Tensor, Tensor, Tensor, Batch, float], tuple[Tensor, Tensor]]
# (saved with BSH… or SN… tensors, k, v, batch, scale) -> (dq, dk, dv), shaped as q, k and v are
Backward = Callable[[Saved, Tensor, Tensor, Batch, float], tuple[Tensor, Tensor, Tensor]]


def attend(
    forward: Forward, q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float
) -> Iterator[Part]:
    for batch in batches(tuple(bands), q_BHSD.device):
        q, k, v = _taken(q_BHSD, batch.rows, batch), _taken(k_BGTD, batch.keys, batch), _taken(v_BGTE, batch.keys, batch)
        out, lse = forward(q, k, v, batch, scale)
        shape = q_BHSD.shape[:2]
        yield Part(batch.rows.start, batch.rows.stop, Partial(_heads_first(out, shape), lse.view(*shape, -1)))


def attend_backward(
    backward: Backward,
    saved: Saved,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
) -> Iterator[Gradients]:
    lse_BHS = finite(saved.lse_BHS)
    for batch in batches(tuple(bands), k_BGTD.device):
        q, dout, out = (_taken(x, batch.rows, batch).to(k_BGTD.dtype) for x in saved[:3])
        lse, dlse = (None if x is None else _row_numbers(x, batch) for x in (lse_BHS, saved.dlse_BHS))
        assert lse is not None
        part = Saved(q, dout, out, lse, dlse)
        k, v = _taken(k_BGTD, batch.keys, batch), _taken(v_BGTE, batch.keys, batch)
        dq, dk, dv = backward(part, k, v, batch, scale)
        heads, kv_heads = saved.q_BHSD.shape[:2], k_BGTD.shape[:2]
        yield Gradients(batch.rows, _heads_first(dq, heads), batch.keys, _heads_first(dk, kv_heads), _heads_first(dv, kv_heads))


def _taken(x_BHSD: Tensor, rows: slice, batch: Batch) -> Tensor:
    """The rows as (B, S, H, D). Several sequences come without a batch: its members are so many more heads, (S, B × H, D)."""
    if rows.stop - rows.start < x_BHSD.shape[2]:
        x_BHSD = x_BHSD[:, :, rows]
    return x_BHSD.transpose(1, 2) if batch.queries is None else x_BHSD.flatten(0, 1).transpose(0, 1)


def _row_numbers(x_BHS: Tensor, batch: Batch) -> Tensor:
    x_BHS = x_BHS[:, :, batch.rows]
    return x_BHS if batch.queries is None else x_BHS.flatten(0, 1)


def _heads_first(x: Tensor, shape: Sequence[int]) -> Tensor:
    """(B, S, H, E) or (S, B × H, E) as (B, H, S, E)."""
    return x.transpose(1, 2) if x.ndim == 4 else x.transpose(0, 1).unflatten(0, shape)
