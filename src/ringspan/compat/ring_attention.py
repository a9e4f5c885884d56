"""``_templated_ring_attention`` and its backward: ringspan's attention of plain tensors.

Legend: B batch, H query heads, S queries, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.compat.call_settings import hold_settings, settings_of
from ringspan.compat.default_layouts import contiguous_of_counts, default_layouts
from ringspan.compat.shardings import shardings_of
from ringspan.engine import PlanHandle, attend
from ringspan.errors import UnplannedAttention
from ringspan.masks import causal, full
from ringspan.planner import plan
from ringspan.transports import ProcessGroupTransport

REMEDY = "use rs.attention(q, k, v, plan=rs.plan(mask, layout=...), group=group)"


def _templated_ring_attention(
    group: dist.ProcessGroup,
    seq_dim: int,
    op: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    **kwargs: object,
) -> tuple[Tensor, ...]:
    """Return out (B, H, S, E) and lse (B, H, S) of this rank's queries over the keys of all ranks.

    The tokens are on dim 2, the same number on every rank, in the order of ``_cp_options.enable_load_balance``. ``op``
    is not called: ringspan chooses the kernel, and its log-sum-exp is that of torch's operators. Of the keywords,
    ``scale`` is used; the others configure torch's operators and have no effect, except that dropout and a bias are
    refused.
    """
    handle = _handle(group, query, key, is_causal, kwargs)
    return tuple(attend(handle, query, key, value, _scale(kwargs)))


def _templated_ring_attention_backward(
    group: dist.ProcessGroup,
    seq_dim: int,
    op: Any,
    grad_out: Tensor,
    grad_out_name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v for a gradient of out.

    The forward pass is computed again; ``out`` and ``logsumexp`` are not used. Code that calls attention under autograd
    does not need this function, and computes nothing twice.
    """
    handle = _handle(group, query, key, is_causal, kwargs)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
        return torch.autograd.grad(attend(handle, q, k, v, _scale(kwargs)).out, (q, k, v), grad_out)


def _handle(group: dist.ProcessGroup, query: Tensor, key: Tensor, is_causal: bool, kwargs: dict[str, Any]) -> PlanHandle:
    if kwargs.get("attn_bias") is not None:
        raise UnplannedAttention(
            "attn_bias is not supported in context-parallel attention: use flex_attention with a score_mod"
        )
    if kwargs.get("dropout_p"):
        raise UnplannedAttention(
            f"dropout_p={kwargs['dropout_p']!r} is not supported in context-parallel attention: set it to 0"
        )
    shardings, ranks = shardings_of(group), ProcessGroupTransport(group)
    hold_settings(shardings)
    settings = settings_of(shardings)
    q_counts, kv_counts = (query.shape[2],) * ranks.world, (key.shape[2],) * ranks.world
    if is_causal and q_counts != kv_counts:
        raise NotImplementedError(
            f"causal attention of {query.shape[2]} queries and {key.shape[2]} keys: lengths must be equal"
        )
    if is_causal:
        (layout,) = default_layouts(q_counts, settings.orders_of(sum(q_counts)), remedy=REMEDY)
        mask, kv_layout = causal(sum(q_counts)), layout
    else:
        layout, kv_layout = contiguous_of_counts(q_counts), contiguous_of_counts(kv_counts)
        mask = full(sum(q_counts), sum(kv_counts))
    found = plan(
        mask,
        world=ranks.world,
        rank=ranks.rank,
        strategy=settings.strategy,
        layout=layout,
        kv_layout=kv_layout,
        dkv_dtype=settings.dkv_dtype(query.dtype),
    )
    return PlanHandle(plan=found, group=ranks, backend="auto")


def _scale(kwargs: dict[str, Any]) -> float | None:
    scale: float | None = kwargs.get("scale")
    return scale
