"""Gather the rows at fixed offsets from each token by the transfers of a plan: ``cp.roll`` and ``cp.halo``.
``cp.route`` gathers those at offset 0, from another layout.

The plan is one of the mask :func:`ringspan.masks.offsets.offsets` by ``exchange(stages=1)``: it delivers the rows of
other ranks that its queries see. Where attention would compute scores, the rows are copied::

    forward    x ──► [own rows | received rows | fill]  ──index──►  (tokens, width, features)
    backward   gradient of the windows  ──index, added──►  gradients of own and received rows ──► returned to their owners

Backward, the rows themselves are not needed, so only the gradients of the plan's backward pass are sent.

Legend: S tokens of a rank, W width of a window, F features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.caching.by_stream import cache_by_stream, copy_to_device
from ringspan.engine.autograd import once_differentiable
from ringspan.engine.executor import Pass, Run, run_steps
from ringspan.engine.slots import Slots
from ringspan.kernels import GradientAccumulator, accumulation_dtype
from ringspan.layouts import Layout
from ringspan.masks.offsets import offsets
from ringspan.masks.table import K0, K1, Q0, Q1
from ringspan.planner import Plan, plan
from ringspan.plans import Task
from ringspan.transports import CallDescription, RankGenerator

Ints = NDArray[np.int64]

STRATEGY = "exchange(stages=1)"


class RowWindow(NamedTuple):
    """The offsets ``first`` to ``last`` from each token, and the value of rows that do not exist."""

    first: int
    last: int
    fill: float = 0.0


def window_plan(lengths: Any, layout: Layout, window: RowWindow, rank: int, source: Layout | None = None) -> Plan:
    """Return the plan that delivers the rows of the windows of a rank. ``lengths`` are those of the documents, and
    ``source`` is the layout in which the rows are given (None: ``layout``)."""
    mask = offsets(lengths, window.first, window.last)
    return plan(mask, world=layout.world, rank=rank, strategy=STRATEGY, layout=layout, kv_layout=source)


def windows_of_ranks(plans: Sequence[Plan], xs_SF: Sequence[Tensor], window: RowWindow, run: Run, kind: str) -> list[Tensor]:
    """Return the windows (S, W, F) of each rank in this process; differentiable. ``kind`` names the call in errors."""
    return list(_Windows.apply(plans, window, run, kind, *xs_SF))


@dataclass(frozen=True, slots=True, eq=False)
class SourceRows:
    """For each token and offset, the row of its source in [own rows | received rows | fill]: (S, W)."""

    index_SW: Ints


def source_rows(plan: Plan, first: int, last: int) -> SourceRows:
    """Find the source row of each token and offset.

    Call it as ``plan.derived(source_rows, first, last)``, which caches the result.
    """
    own = plan.q_layout.positions(plan.rank)
    before = plan.kv_layout.positions(plan.rank)
    received = [task.kv_tokens.expand(0) for step in plan.program.forward for task in step.tasks if task.kv_tokens is not None]
    held = np.concatenate([before, *received])
    order = np.argsort(held)
    wanted_SW = own[:, None] + np.arange(first, last + 1)
    table = plan.mask.table  # one band for each document
    if not len(table) or not len(own):
        return SourceRows(np.full_like(wanted_SW, _capacity(plan)))
    band = np.maximum(table[:, Q0].searchsorted(own, side="right") - 1, 0)
    seen_SW = ((own >= table[band, Q0]) & (own < table[band, Q1]))[:, None]
    seen_SW = seen_SW & (wanted_SW >= table[band, K0, None]) & (wanted_SW < table[band, K1, None])
    at_SW = np.minimum(held[order].searchsorted(wanted_SW), len(held) - 1)
    found_SW = order[at_SW]
    assert (held[found_SW] == wanted_SW)[seen_SW].all(), "the plan delivers every visible row"
    return SourceRows(np.where(seen_SW, found_SW, _capacity(plan)))


def _capacity(plan: Plan) -> int:
    """Return the rows of the plan's slots together."""
    return sum(slot.rows for slot in plan.program.kv_slots)


@cache_by_stream(64)
def _index(rows: SourceRows, device: torch.device) -> Tensor:
    return copy_to_device(rows.index_SW, device)


def _forward(plan: Plan, x_SF: Tensor, window: RowWindow) -> RankGenerator[tuple[Tensor, ...]]:
    def prepare() -> Pass:
        own = x_SF.contiguous()[:, None, None, :]  # slots are (rows, batch, heads, dim)
        received = [own.new_empty((slot.rows, *own.shape[1:])) for slot in plan.program.kv_slots[1:]]

        def finish() -> tuple[Tensor, ...]:
            fill = own.new_full((1, *own.shape[1:]), window.fill)
            index_SW = _index(plan.derived(source_rows, window.first, window.last), x_SF.device)
            rows = torch.cat([own, *received, fill]).flatten(1)
            return (rows.index_select(0, index_SW.flatten()).unflatten(0, index_SW.shape),)

        return Pass(Slots({"q": [], "kv": [own, *received]}, dtype=own.dtype), _computes_nothing, finish)

    return run_steps(plan, "forward", prepare)


def _backward(plan: Plan, dwindows_SWF: Tensor, window: RowWindow) -> RankGenerator[tuple[Tensor, ...]]:
    def prepare() -> Pass:
        index_SW = _index(plan.derived(source_rows, window.first, window.last), dwindows_SWF.device)
        like = torch.empty(0, dtype=accumulation_dtype(dwindows_SWF.dtype), device=dwindows_SWF.device)
        sizes = [slot.rows for slot in plan.program.kv_slots]
        features = dwindows_SWF.shape[-1]
        total = like.new_zeros((sum(sizes) + 1, features))
        total.index_add_(0, index_SW.flatten(), dwindows_SWF.flatten(0, 1).to(like.dtype))
        gradients = []
        for rows, part in zip(sizes, total[:-1].split(sizes), strict=True):
            gradients.append(GradientAccumulator((rows, 1, 1), (features,), like=like))
            if rows:
                gradients[-1].add(0, rows, part[:, None, None, :])

        def finish() -> tuple[Tensor, ...]:
            return (gradients[0].finish()[0].flatten(1) if sizes[0] else total[:0],)

        return Pass(
            Slots({"q": [], "kv": []}, gradients={"dkv": gradients}, dtype=dwindows_SWF.dtype), _computes_nothing, finish
        )

    return run_steps(plan, "backward", prepare, only="dkv")


def _computes_nothing(task: Task, step: int) -> None:
    """Do nothing: the rows are copied when all have arrived."""


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plans: Sequence[Plan], window: RowWindow, run: Run, kind: str, *xs_SF: Tensor) -> tuple[Tensor, ...]:
        ctx.plans, ctx.window, ctx.run, ctx.kind = plans, window, run, kind
        ctx.dtype = xs_SF[0].dtype
        generators = [_forward(plan, x, window) for plan, x in zip(plans, xs_SF, strict=True)]
        return tuple(windows for (windows,) in run(generators, _description(kind, plans[0], xs_SF[0])))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            generators = [_backward(plan, grad, ctx.window) for plan, grad in zip(ctx.plans, grads, strict=True)]
            found = ctx.run(generators, _description(f"{ctx.kind}, backward", ctx.plans[0], grads[0]))
            gradients = [dx.to(ctx.dtype) for (dx,) in found]
        if torch.is_grad_enabled():  # create_graph=True: the gradient may be differentiated
            gradients = [once_differentiable(dx, *grads) for dx in gradients]
        return None, None, None, None, *gradients


def _description(kind: str, plan: Plan, x: Tensor) -> CallDescription:
    return CallDescription(kind, plan.digest, None, str(x.dtype).removeprefix("torch."), (x.shape[-1],))
