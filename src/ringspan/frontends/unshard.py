"""Gather the tokens of all ranks: the autograd function of ``cp.unshard``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringspan.layouts import Layout
from ringspan.transports import ProcessGroupTransport


class Unshard(torch.autograd.Function):
    """The whole sequence in its original order, from this rank's tokens. ``grad`` is that of ``cp.unshard``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroupTransport, layout: Layout, dim: int, grad: str) -> Tensor:
        ctx.group, ctx.layout, ctx.dim, ctx.grad = group, layout, dim, grad
        parts = group.all_gather_rows(
            x.movedim(dim, 0).contiguous(), layout.counts, label="unshard", options=f"layout {layout.digest}"
        )
        inverse_order = torch.from_numpy(layout.order()).to(x.device).argsort()
        return torch.cat(parts).index_select(0, inverse_order).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        if ctx.grad == "partial":
            grad_output = ctx.group.all_reduce_sum(grad_output.contiguous(), label="unshard, backward")
        mine = torch.from_numpy(ctx.layout.positions(ctx.group.rank)).to(grad_output.device)
        return grad_output.index_select(ctx.dim, mine), None, None, None, None
