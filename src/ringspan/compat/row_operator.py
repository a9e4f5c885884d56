"""Attention as an operator whose rows of the batch may have different plans: ``ringspan::attend_rows``.

A balancer can order each row of a batch differently. Compiled code does not know whether it does, so its operator has
one plan id for each row. If all of them are equal, the whole batch is one call of ``ringspan::attend``.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringspan.compat.error_texts import in_torchs_names
from ringspan.engine import PlanHandle
from ringspan.engine.autograd import positive_scale, saved_tensors
from ringspan.engine.operator import fake_gradients, fake_results, refuse_second_derivative, save_for_backward
from ringspan.errors import InputError, PeerMismatch
from ringspan.kernels import Partial


def attend_rows(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, plan_ids_B: Tensor, scale: float) -> Partial:
    """Compute attention under the plans registered under these ids, as one operator."""
    scale, sign = positive_scale(scale)
    q_BHSD = q_BHSD if sign == 1 else q_BHSD * sign
    out_SBHE, lse_SBH = torch.ops.ringspan.attend_rows(q_BHSD, k_BGTD, v_BGTE, plan_ids_B, scale)
    return Partial(out_SBHE.movedim(0, 2), lse_SBH.movedim(0, 2))


def ids_of(handles: list[PlanHandle], batch: int) -> Tensor:
    """Return the ids of the plans of all rows. The tensor owns the handles, as the id of a handle does."""
    rows = handles * batch if len(handles) == 1 else handles
    ids_B = torch.stack([handle.id for handle in rows if handle.id is not None])
    ids_B.ringspan_handles = [handle.id for handle in handles]  # type: ignore[attr-defined]
    return ids_B


torch.library.define(
    "ringspan::attend_rows", "(Tensor q, Tensor k, Tensor v, Tensor plan_ids, float scale) -> (Tensor, Tensor)"
)
torch.library.define(
    "ringspan::attend_rows_backward",
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor plan_ids, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("ringspan::attend_rows", "CompositeExplicitAutograd")
def _attend_rows(q: Tensor, k: Tensor, v: Tensor, plan_ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    attend = torch.ops.ringspan.attend
    try:
        if _all_equal(plan_ids):
            out, lse = attend(q, k, v, plan_ids[0], scale)
            return out, lse
        rows = [attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], plan_ids[b], scale) for b in range(len(q))]
    except (InputError, PeerMismatch) as error:
        raise in_torchs_names(error) or error from None
    return torch.cat([out for out, _ in rows], dim=1), torch.cat([lse for _, lse in rows], dim=1)


@torch.library.impl("ringspan::attend_rows_backward", "CompositeExplicitAutograd")
def _attend_rows_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan_ids: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    backward = torch.ops.ringspan.attend_backward
    if _all_equal(plan_ids):
        return tuple(backward(dout, dlse, q, k, v, out, lse, plan_ids[0], scale))

    def of_row(x: Tensor | None, b: int, dim: int) -> Tensor | None:
        return None if x is None else x.narrow(dim, b, 1)

    rows = []
    for b in range(len(q)):
        grads = (of_row(x, b, 1) for x in (dout, dlse))
        inputs, results = (of_row(x, b, 0) for x in (q, k, v)), (of_row(x, b, 1) for x in (out, lse))
        rows.append(backward(*grads, *inputs, *results, plan_ids[b], scale))
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def _all_equal(plan_ids: Tensor) -> bool:
    return bool((plan_ids == plan_ids[0]).all())


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, plan_ids, out, lse = saved_tensors(ctx)
    grads = torch.ops.ringspan.attend_rows_backward(dout, dlse, q, k, v, out, lse, plan_ids, ctx.scale)
    return *grads, None, None


torch.library.register_fake("ringspan::attend_rows", fake_results)
torch.library.register_fake("ringspan::attend_rows_backward", fake_gradients)
torch.library.register_autograd("ringspan::attend_rows", _differentiate, setup_context=save_for_backward)
torch.library.register_autograd("ringspan::attend_rows_backward", refuse_second_derivative)
