"""Run the engine on all ranks of a plan, and compare it with the dense reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringspan.engine import AttentionConfig, attend_ranks
from ringspan.kernels import Partial, cpu
from ringspan.kernels.reference import dense_attention
from ringspan.masks import Mask
from ringspan.planner import Plan
from ringspan.testing.assertions import largest_difference
from ringspan.testing.comparison import EXACT, Tensors, results_of

__all__ = ["EXACT", "Tensors", "case", "worst_error"]


def case(mask: Mask, *, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, v_dim: int = 6, batch: int = 2) -> Tensors:
    """Return random q, k, v and gradients for the whole sequence, in float64."""
    source = torch.Generator().manual_seed(0)
    q_len, k_len = mask.lengths

    def normal(*size: int) -> Tensor:
        return torch.randn(batch, *size, generator=source, dtype=torch.float64)

    return Tensors(
        normal(heads, q_len, head_dim),
        normal(kv_heads, k_len, head_dim),
        normal(kv_heads, k_len, v_dim),
        normal(heads, q_len, v_dim),
        normal(heads, q_len),
    )


def worst_error(plans: Sequence[Plan], given: Tensors, run: Callable[[Sequence[Any]], list[Any]], kernel: Any = cpu) -> float:
    """Run forward and backward of all ranks with ``run``. Return the largest difference from the dense reference."""
    mask, q_layout, kv_layout = plans[0].mask, plans[0].q_layout, plans[0].kv_layout
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    pieces = [(q_layout, leaves[0]), (kv_layout, leaves[1]), (kv_layout, leaves[2])]
    split = [tuple(x.index_select(2, torch.from_numpy(layout.positions(plan.rank))) for layout, x in pieces) for plan in plans]
    config = AttentionConfig(kernel=kernel, scale=given.q.shape[-1] ** -0.5, head_dim=given.q.shape[-1])
    parts = attend_ranks(plans, split, config, run)  # type: ignore[arg-type]
    back = torch.from_numpy(q_layout.order()).argsort()
    result = Partial(*(torch.cat(of_ranks, dim=2).index_select(2, back) for of_ranks in zip(*parts, strict=True)))
    reference_leaves = [x.clone().requires_grad_() for x in given[:3]]
    reference = dense_attention(*reference_leaves, torch.from_numpy(mask.dense()))  # type: ignore[arg-type]
    actual = results_of(result, leaves, given.dout, given.dlse)
    expected = results_of(reference, reference_leaves, given.dout, given.dlse)
    return max(largest_difference(*pair) for pair in zip(actual, expected, strict=True))
