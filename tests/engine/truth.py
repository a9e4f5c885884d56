"""Tensors for the engine, split as a plan says, and what attention must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.engine import AttentionConfig, attend_ranks
from ringspan.kernels import Partial, cpu
from ringspan.kernels.reference import dense_attention
from ringspan.masks import Mask
from ringspan.planner import Plan

EXACT = 1e-12


class Case(NamedTuple):
    """Whole sequences, and the weights of a loss of out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def case(mask: Mask, *, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, v_dim: int = 6, batch: int = 2) -> Case:
    source = torch.Generator().manual_seed(0)
    q_len, k_len = mask.lengths

    def normal(*size: int) -> Tensor:
        return torch.randn(batch, *size, generator=source, dtype=torch.float64)

    return Case(
        normal(heads, q_len, head_dim),
        normal(kv_heads, k_len, head_dim),
        normal(kv_heads, k_len, v_dim),
        normal(heads, q_len, v_dim),
        normal(heads, q_len),
    )


def gradients(result: Partial, leaves: Sequence[Tensor], given: Case) -> list[Tensor]:
    if not result.out.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return list(torch.autograd.grad([*result], list(leaves), [given.dout, given.dlse]))


def worst_error(plans: Sequence[Plan], given: Case, run: Callable[[Sequence[Any]], list[Any]], kernel: Any = cpu) -> float:
    """Forward and backward of all ranks, driven by ``run``: the largest difference of any result from the dense reference."""
    mask, q_layout, kv_layout = plans[0].mask, plans[0].q_layout, plans[0].kv_layout
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    pieces = [(q_layout, leaves[0]), (kv_layout, leaves[1]), (kv_layout, leaves[2])]
    split = [tuple(x.index_select(2, torch.from_numpy(layout.positions(plan.rank))) for layout, x in pieces) for plan in plans]
    config = AttentionConfig(kernel=kernel, scale=given.q.shape[-1] ** -0.5, head_dim=given.q.shape[-1])
    parts = attend_ranks(plans, split, config, run)  # type: ignore[arg-type]
    back = torch.from_numpy(q_layout.order()).argsort()
    result = Partial(*(torch.cat(of_ranks, dim=2).index_select(2, back) for of_ranks in zip(*parts, strict=True)))
    truth_leaves = [x.clone().requires_grad_() for x in given[:3]]
    truth = dense_attention(*truth_leaves, torch.from_numpy(mask.dense()))  # type: ignore[arg-type]
    assert torch.equal(result.lse.isneginf(), truth.lse.isneginf())
    pairs = [*zip(result, truth, strict=True)]
    pairs += zip(gradients(result, leaves, given), gradients(truth, truth_leaves, given), strict=True)
    worst = 0.0
    for is_, should in pairs:
        off = (is_ - should).masked_fill(should.isneginf(), 0.0).abs()
        assert not off.isnan().any()
        worst = max([worst, *off.flatten().tolist()])
    return worst
