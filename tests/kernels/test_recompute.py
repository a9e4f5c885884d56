"""Compare the gradients of recomputed partial results with autograd through the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringspan.kernels.kernel import Saved
from ringspan.kernels.partial import Partial
from ringspan.kernels.recompute import gradients
from ringspan.kernels.reference import dense_attention

S, T = 13, 17


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["dout", "dout and dlse"])
def test_gradients_of_partial_results_add_up_to_those_of_the_whole(parts: int, with_dlse: bool) -> None:
    """Every pair is in one partial result or in none. Some rows are empty in some of them, two rows in all."""
    torch.manual_seed(parts)
    q, k, v = (
        torch.randn(2, h, n, e, dtype=torch.float64, requires_grad=True) for h, n, e in ((4, S, 8), (2, T, 8), (2, T, 5))
    )
    part_of_ST = torch.randint(-1, parts, (S, T))
    part_of_ST[3], part_of_ST[7] = -1, -1
    part_of_ST[9] = 0
    whole = dense_attention(q, k, v, part_of_ST >= 0, scale=0.5)
    blind = whole.lse == -torch.inf
    assert blind.sum() == 2 * 2 * 4
    dout = torch.randn_like(whole.out)
    dlse = torch.randn_like(whole.lse).masked_fill(blind, 0.0) if with_dlse else None
    outputs = (whole.out, whole.lse) if with_dlse else (whole.out,)
    wanted = torch.autograd.grad(outputs, (q, k, v), (dout, dlse) if with_dlse else (dout,))

    saved = Saved(q, dout, whole.out, whole.lse, dlse)
    got = [torch.zeros_like(x) for x in (q, k, v)]
    for n in range(parts):

        def part(q: Tensor, k: Tensor, v: Tensor, n: int = n) -> Partial:
            return dense_attention(q, k, v, part_of_ST == n, scale=0.5)

        of_part = gradients(part, saved, k, v)
        assert not any(x.requires_grad for x in of_part)
        got = [total + x for total, x in zip(got, of_part, strict=True)]
    torch.testing.assert_close(got, list(wanted))
