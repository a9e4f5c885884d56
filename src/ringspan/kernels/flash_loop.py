"""The loop over calls (:mod:`ringspan.kernels.flash_calls`) that the kernels flash and fa4 share.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim, N = B × H or
B × G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ringspan.kernels.flash_calls import FlashCall, make_flash_calls
from ringspan.kernels.kernel import Gradients, PartialRows, Saved
from ringspan.kernels.partial import Partial, finite_lse
from ringspan.masks import Band

# (q_BSHD, k_BTGD, v_BTGE, call, scale) -> (out_BSHE, lse_BHS)
# or, for several sequences, (q_SND, k_TND, v_TNE, call, scale) -> (out_SNE, lse_NS)
Forward = Callable[[Tensor, Tensor, Tensor, FlashCall, float], tuple[Tensor, Tensor]]
# (saved with tensors BSH… or SN…, k, v, call, scale) -> (dq, dk, dv), in the shapes of q, k and v
Backward = Callable[[Saved, Tensor, Tensor, FlashCall, float], tuple[Tensor, Tensor, Tensor]]


def attend(
    forward: Forward, q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, bands: Sequence[Band], *, scale: float
) -> Iterator[PartialRows]:
    for call in make_flash_calls(tuple(bands), q_BHSD.device):
        q, k, v = (
            _slice_rows(q_BHSD, call.queries, call),
            _slice_rows(k_BGTD, call.keys, call),
            _slice_rows(v_BGTE, call.keys, call),
        )
        out, lse = forward(q, k, v, call, scale)
        shape = q_BHSD.shape[:2]
        out, lse = _heads_first(out, shape), lse.view(*shape, -1)
        for start, stop, rows in _parts(call):
            yield PartialRows(start, stop, Partial(out[:, :, rows], lse[:, :, rows]))


def attend_backward(
    backward: Backward,
    saved: Saved,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
) -> Iterator[Gradients]:
    lse_BHS = finite_lse(saved.lse_BHS)
    for call in make_flash_calls(tuple(bands), k_BGTD.device):
        q, dout, out = (_slice_rows(x, call.queries, call).to(k_BGTD.dtype) for x in saved[:3])
        lse, dlse = (None if x is None else _slice_lse(x, call) for x in (lse_BHS, saved.dlse_BHS))
        assert lse is not None
        of_call = Saved(q, dout, out, lse, dlse)
        k, v = _slice_rows(k_BGTD, call.keys, call), _slice_rows(v_BGTE, call.keys, call)
        dq, dk, dv = backward(of_call, k, v, call, scale)
        heads, kv_heads = saved.q_BHSD.shape[:2], k_BGTD.shape[:2]
        dq, dk, dv = _heads_first(dq, heads), _heads_first(dk, kv_heads), _heads_first(dv, kv_heads)
        keys = call.keys
        for start, stop, rows in _parts(call):
            yield Gradients(slice(start, stop), dq[:, :, rows], keys, dk, dv)
            keys, dk, dv = NO_KEYS, dk[:, :, NO_KEYS], dv[:, :, NO_KEYS]  # those of all keys are in the first part


NO_KEYS = slice(0, 0)


def _parts(call: FlashCall) -> Iterator[tuple[int, int, slice]]:
    """Yield the rows of each part, as start, stop, and counted from the first query of the call."""
    first = call.queries.start
    for part in call.query_parts:
        yield part.start, part.stop, slice(part.start - first, part.stop - first)


def _slice_rows(x_BHSD: Tensor, rows: slice, call: FlashCall) -> Tensor:
    """Return the rows as (B, S, H, D), or for several sequences as (S, B × H, D): such calls have no batch dim."""
    if rows.stop - rows.start < x_BHSD.shape[2]:
        x_BHSD = x_BHSD[:, :, rows]
    return x_BHSD.transpose(1, 2) if call.q_sequences is None else x_BHSD.flatten(0, 1).transpose(0, 1)


def _slice_lse(x_BHS: Tensor, call: FlashCall) -> Tensor:
    x_BHS = x_BHS[:, :, call.queries]
    return x_BHS if call.q_sequences is None else x_BHS.flatten(0, 1)


def _heads_first(x: Tensor, shape: Sequence[int]) -> Tensor:
    """View (B, S, H, E) or (S, B × H, E) as (B, H, S, E)."""
    return x.transpose(1, 2) if x.ndim == 4 else x.transpose(0, 1).unflatten(0, shape)
