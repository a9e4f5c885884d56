"""The gradients of a partial result, from any differentiable computation of it.

The backward pass has the *final* out and lse, over all keys of all ranks. Autograd through a partial result has only
its own out and lse, named ``out_part`` and ``lse_part`` here. A pair of weight ``p`` in the partial result has the
weight ``share * p`` in the final one, with ``share = exp(lse_part - lse)``. The gradient of its score, first as it is
wanted, then as autograd computes it from the gradients of ``out_part`` and ``lse_part``::

    share * p * (dout      · v - (dout      · out      - dlse     ))
            p * (dout_part · v - (dout_part · out_part - dlse_part))

These are the same for ``dout_part = share * dout`` and
``dlse_part = dout_part · out_part - share * (dout · out - dlse)``.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringspan.kernels.kernel import Saved
from ringspan.kernels.partial import EMPTY_LSE, Partial

# (q_BHSD, k_BGTD, v_BGTE, *learned) -> Partial(out_BHSE, lse_BHS), by operations that autograd records
PartialFunction = Callable[..., Partial]


@torch.no_grad()
def gradients(
    compute: PartialFunction, saved: Saved, k_BGTD: Tensor, v_BGTE: Tensor, learned: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Compute the partial result again, and return the gradients through it: dq, dk, dv and those of ``learned``.

    A learned tensor acts through the scores alone. The identity above is one of scores, so it holds for them, too.
    """
    leaves = [x.detach().requires_grad_() for x in (saved.q_BHSD, k_BGTD, v_BGTE, *learned)]
    with torch.enable_grad():
        again = compute(*leaves)
    # If a score_mod ignores its score, then lse may not depend on any leaf.
    pairs = [(x, grad) for x, grad in zip(again, _gradients_of_partial(saved, again), strict=True) if x.requires_grad]
    outputs, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaves, grads, allow_unused=True, materialize_grads=True)


def _gradients_of_partial(saved: Saved, part: Partial) -> Partial:
    """Return the gradients of the partial result's own out and lse."""
    wide = part.lse.dtype
    # Where the partial result is empty the final one may be empty, too, and then the difference of their lse is NaN.
    share_BHS1 = torch.exp(part.lse - saved.lse_BHS).masked_fill_(part.lse == EMPTY_LSE, 0.0).unsqueeze(-1)
    dout, out = saved.dout_BHSE.to(wide), saved.out_BHSE.to(wide)
    delta_BHS = (dout * out).sum(-1)
    if saved.dlse_BHS is not None:
        delta_BHS -= saved.dlse_BHS
    # Round dout_part before dlse_part is computed from it: the term that autograd subtracts then cancels exactly.
    dout_part = (share_BHS1 * dout).to(part.out.dtype)
    dlse_part = (dout_part.to(wide) * part.out.to(wide)).sum(-1) - share_BHS1.squeeze(-1) * delta_BHS
    return Partial(dout_part, dlse_part)
