"""The loop over calls of flash attention. Dense attention takes the place of the flash kernel."""

from __future__ import annotations

import pytest
import torch

from ringspan.kernels import flash_calls, flash_loop, reference
from ringspan.kernels.accumulators import OutputAccumulator
from ringspan.kernels.flash_calls import FlashCall
from ringspan.kernels.kernel import Saved
from ringspan.masks import Band
from ringspan.masks import table as tables
from tests.kernels.test_flash_calls import sequences

# Two triangles with a gap between their keys, which are one call; a trapezoid, a rectangle, and a window.
BANDS = (
    Band(0, 3, 0, 3, -2, 0),
    Band(3, 5, 4, 6, 0, 1),
    Band(5, 9, 2, 7, -6, 1),
    Band(7, 9, 8, 10, -1, 2),
    Band(2, 6, 7, 11, 3, 7),
)


# One call, and queries between its sequences that see no key.
WITH_GAP = (Band(1, 3, 0, 3, -2, 1), Band(6, 9, 4, 11, -4, 4))


@pytest.mark.parametrize(
    ("bands", "min_gap", "parts"), [(BANDS, 1, 4), (WITH_GAP, 1024, 1), (WITH_GAP, 1, 2)], ids=["", "with gap", "gap left out"]
)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_partial_results_and_gradients_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, with_dlse: bool, bands: tuple[Band, ...], min_gap: int, parts: int
) -> None:
    monkeypatch.setattr(flash_calls, "MIN_GAP", min_gap)
    flash_calls.make_flash_calls.cache_clear()  # type: ignore[attr-defined]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 4, dtype=torch.float64) for h, n in ((4, 9), (2, 11), (2, 11)))

    def dense_bands(call: FlashCall, rows: int, cols: int) -> list[Band]:
        """Return the pairs of a call, by the definition of its window in each of its sequences."""
        left, right = call.window
        found = []
        for q, k in sequences(call):
            corner = k.stop - q.stop
            lo = -rows if left is None else corner - left
            hi = cols if right is None else corner + right
            found += [Band(*row) for row in tables.table((q.start, q.stop, k.start, k.stop, lo, hi)).tolist()]
        return found

    def as_kernel(x):  # type: ignore[no-untyped-def]
        """View (B, S, H, D), or (S, 2 × H, D) for several sequences, as (2, H, S, D)."""
        return x.transpose(1, 2) if x.ndim == 4 else x.transpose(0, 1).unflatten(0, (2, -1))

    def as_call(x, like):  # type: ignore[no-untyped-def]
        return x.transpose(1, 2) if like.ndim == 4 else x.flatten(0, 1).transpose(0, 1)

    def forward(q, k, v, call, scale):  # type: ignore[no-untyped-def]
        bands = dense_bands(call, 9, 11)
        (part,) = reference.attend(*(as_kernel(x) for x in (q, k, v)), bands, scale=scale)
        lse = part.partial.lse
        return as_call(part.partial.out, q), lse if q.ndim == 4 else lse.flatten(0, 1)

    def backward(saved, k, v, call, scale):  # type: ignore[no-untyped-def]
        numbers = (x if x is None or x.ndim == 3 else x.unflatten(0, (2, -1)) for x in saved[3:])
        inner = Saved(*(as_kernel(x) for x in saved[:3]), *numbers)
        (part,) = reference.attend_backward(inner, as_kernel(k), as_kernel(v), dense_bands(call, 9, 11), scale=scale)
        return tuple(as_call(x, k) for x in (part.dq_BHSD, part.dk_BGTD, part.dv_BGTE))

    result = OutputAccumulator((9, 2, 4, 4), like=q)
    for start, stop, (out, lse) in flash_loop.attend(forward, q, k, v, bands, scale=0.5):
        result.add(start, stop, out.movedim(2, 0), lse.movedim(2, 0))
    (want,) = reference.attend(q, k, v, bands, scale=0.5)
    out, lse = (x.movedim(0, 2) for x in result.finish())
    torch.testing.assert_close(out, want.partial.out)
    torch.testing.assert_close(lse, want.partial.lse)

    saved = Saved(q, torch.randn_like(out), out, lse, torch.randn_like(lse) if with_dlse else None)
    (wanted,) = reference.attend_backward(saved, k, v, bands, scale=0.5)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    yielded = list(flash_loop.attend_backward(backward, saved, k, v, bands, scale=0.5))
    assert len(yielded) == parts
    for part in yielded:
        dq[:, :, part.rows] += part.dq_BHSD
        dk[:, :, part.keys] += part.dk_BGTD
        dv[:, :, part.keys] += part.dv_BGTE
    torch.testing.assert_close([dq, dk, dv], [wanted.dq_BHSD, wanted.dk_BGTD, wanted.dv_BGTE])
