"""Bands as flash attention's windows: its definition, counted from the bottom right corner, gives the band back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from ringspan.kernels import reference, windowed
from ringspan.kernels.kernel import Saved
from ringspan.kernels.partial import Accumulator
from ringspan.masks import Band
from ringspan.masks import table as tables
from tests.strategies import Drawn, masks


def seen_through(window: windowed.Window, rows: int, cols: int) -> np.ndarray:
    """What flash-attention's documentation says a window shows of ``rows × cols``."""
    distance = np.arange(cols)[None, :] - np.arange(rows)[:, None] - (cols - rows)
    left = np.inf if window.left is None else window.left
    right = np.inf if window.right is None else window.right
    return (-left <= distance) & (distance <= right)


@given(masks())
def test_every_tight_band_is_one_window(drawn: Drawn) -> None:
    for band in drawn.mask:
        window = windowed.window(band)
        local = band.shifted(-band.q0, -band.k0)
        assert np.array_equal(
            seen_through(window, band.rows, band.cols), tables.dense(tables.table(local), band.rows, band.cols)
        )
        assert all(side is None or side >= 0 for side in window)
        assert window.is_causal == (not band.cut_below and band.cut_above and band.hi == band.k1 - band.q1)


BANDS = (Band(0, 5, 0, 5, -4, 0), Band(5, 9, 2, 7, -6, 1), Band(7, 9, 8, 10, -1, 2), Band(2, 6, 7, 11, 3, 7))


@pytest.mark.parametrize("with_dlse", [False, True])
def test_parts_and_gradients_land_where_they_belong(with_dlse: bool) -> None:
    """The loop over bands with dense attention in the place of flash attention."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 4, dtype=torch.float64) for h, n in ((4, 9), (2, 11), (2, 11)))

    def bands_of(window: windowed.Window, rows: int, cols: int) -> list[Band]:
        lo = -rows if window.left is None else cols - rows - window.left
        hi = cols if window.right is None else cols - rows + window.right
        return [Band(*row) for row in tables.table((0, rows, 0, cols, lo, hi)).tolist()]

    def forward(q, k, v, window, scale):  # type: ignore[no-untyped-def]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        (part,) = reference.attend(q, k, v, bands_of(window, q.shape[2], k.shape[2]), scale=scale)
        return part.partial.out.transpose(1, 2), part.partial.lse

    def backward(saved, k, v, window, scale):  # type: ignore[no-untyped-def]
        saved = Saved(*(x.transpose(1, 2) for x in saved[:3]), *saved[3:])
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        grads = [torch.zeros_like(x) for x in (saved.q_BHSD, k, v)]
        names = ("dq_BHSD", "dk_BGTD", "dv_BGTE")
        bands = bands_of(window, saved.q_BHSD.shape[2], k.shape[2])
        reference.attend_backward(saved, k, v, bands, scale=scale, **dict(zip(names, grads, strict=True)))
        return tuple(x.transpose(1, 2) for x in grads)

    result = Accumulator(9, 2, 4, 4, like=q)
    for part in windowed.attend(forward, q, k, v, BANDS, scale=0.5):
        result.add(*part)
    (want,) = reference.attend(q, k, v, BANDS, scale=0.5)
    out, lse = (x.movedim(0, 2) for x in result.finish())
    torch.testing.assert_close(out, want.partial.out)
    torch.testing.assert_close(lse, want.partial.lse)

    saved = Saved(q, torch.randn_like(out), out, lse, torch.randn_like(lse) if with_dlse else None)
    got, wanted = ([torch.zeros_like(x) for x in (q, k, v)] for _ in range(2))
    windowed.attend_backward(backward, saved, k, v, BANDS, scale=0.5, dq_BHSD=got[0], dk_BGTD=got[1], dv_BGTE=got[2])
    reference.attend_backward(saved, k, v, BANDS, scale=0.5, dq_BHSD=wanted[0], dk_BGTD=wanted[1], dv_BGTE=wanted[2])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
