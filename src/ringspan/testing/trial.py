"""Run one case of attention on ranks, and compare everything it gives with dense attention in float64.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.

What is compared: out, lse and the gradients of q, k and v; the plan's own proof; and the bytes that really moved. In
float64 a result may be 1e-12 off, relative to the largest magnitude of what it should be (at least 1). In lower precision it
may be off twice as far as PyTorch's attention is in the same dtype, in one process, through the same mask, and a few ulps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.cli.mask_text import mask_of
from ringspan.kernels import wide
from ringspan.kernels.reference import dense_attention
from ringspan.planner import bytes_moved
from ringspan.plans.data import PHASES
from ringspan.testing.fuzz import Case
from ringspan.transports import ProcessGroupTransport, Traffic

EXACT = 1e-12
TIMES_TORCH = 2.0
# PyTorch may be exactly right by luck, where any other order of the same sums is not: the gradient of a query that sees one key
# is the difference of two equal numbers. So this much is always allowed beside: ulps of the dtype, and of float32 in which
# things are added up, at the magnitude of the terms (see :func:`terms`).
FLOOR_ULPS = 2


class Results(NamedTuple):
    """What attention gives, forward and backward."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Tensors(NamedTuple):
    """What attention is given: whole sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None


class Figure(NamedTuple):
    """How far off a result is, and how far it may be: relative to the largest magnitude of what it should be (at least 1)."""

    error: float
    allowed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case. ``problems`` is empty if all is well."""

    case: Case
    figures: dict[str, Figure]
    problems: tuple[str, ...]

    @property
    def worst(self) -> float:
        return max((figure.error for figure in self.figures.values()), default=0.0)


def run_local(case: Case) -> Outcome:
    """The case with all ranks in this process."""
    mask = mask_of(case.mask)
    given, seen = tensors(case, mask), torch.from_numpy(mask.dense())
    truth = dense(given, seen, case.scale)
    world = rs.LocalWorld(case.world)
    plans = world.plans(mask, strategy=case.strategy, layout=case.layout, kv_layout=case.kv_layout)
    problems = _proof(plans[0], case)
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    got = _results(world.run(plans, *leaves, scale=case.scale), leaves, given.dout, given.dlse)
    for plan, traffic in zip(plans, world.traffic, strict=True):
        problems += _bytes(plan, case, traffic)
    figures = compare(got, truth, allowances(case, given, seen, truth))
    return Outcome(case=case, figures=figures, problems=(*problems, *_too_far(figures)))


def run_rank(case: Case, group: ProcessGroupTransport) -> Outcome:
    """The case on this process's rank of a group, compared for this rank's tokens. Every rank of the group must run it."""
    mask = mask_of(case.mask)
    given, seen = tensors(case, mask), torch.from_numpy(mask.dense())
    truth = dense(given, seen, case.scale)
    cp = rs.ContextParallel(group, mask, strategy=case.strategy, layout=case.layout, kv_layout=case.kv_layout)
    # The proof is the same on all ranks: they take turns.
    problems = _proof(cp.plan, case) if case.index % group.world == group.rank else []
    q, dout = cp.shard(given.q, given.dout, dim=2)
    k, v = cp.shard(given.k, given.v, dim=2, of="kv")
    dlse = None if given.dlse is None else cp.shard(given.dlse, dim=2)
    before = Traffic(group.traffic.sent, group.traffic.received)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    result = rs.attention(*leaves, plan=cp.plan, group=group, scale=case.scale, return_lse=True)
    got = _results(result, leaves, dout, dlse)
    moved = Traffic(group.traffic.sent - before.sent, group.traffic.received - before.received)
    problems += _bytes(cp.plan, case, moved)
    mine = Results(
        *cp.shard(truth.out, truth.lse, truth.dq, dim=2),
        *cp.shard(truth.dk, truth.dv, dim=2, of="kv"),
    )
    figures = compare(got, mine, allowances(case, given, seen, truth), whole=truth)
    return Outcome(case=case, figures=figures, problems=(*problems, *_too_far(figures)))


# -- what goes in, and what should come out ----------------------------------------------------------------------------


def tensors(case: Case, mask: rs.Mask) -> Tensors:
    """The tensors of a case, the same on every machine and rank; rounded to the case's dtype."""
    q_len, k_len = mask.lengths
    source = torch.Generator().manual_seed((case.seed * 1_000_003 + case.index) % 2**63)
    dtype: torch.dtype = getattr(torch, case.dtype)

    def normal(heads: int, *size: int) -> Tensor:
        return torch.randn(case.batch, heads, *size, generator=source, dtype=torch.float64)

    return Tensors(
        q=normal(case.heads, q_len, case.head_dim).to(dtype),
        k=normal(case.kv_heads, k_len, case.head_dim).to(dtype),
        v=normal(case.kv_heads, k_len, case.v_dim).to(dtype),
        dout=normal(case.heads, q_len, case.v_dim).to(dtype),
        dlse=normal(case.heads, q_len).to(wide(dtype)) if case.lse else None,
    )


def dense(given: Tensors, seen_ST: Tensor, scale: float | None) -> Results:
    """What it should be: the reference, in float64."""
    q, k, v = (x.double().requires_grad_() for x in given[:3])
    dlse = None if given.dlse is None else given.dlse.double()
    return _results(dense_attention(q, k, v, seen_ST, scale=scale), [q, k, v], given.dout.double(), dlse)


def torch_alone(given: Tensors, seen_ST: Tensor, scale: float | None) -> Results:
    """What PyTorch makes of it in the tensors' own dtype, in one process; lse and its gradient from scores in float32.

    A query that sees nothing is left out, because PyTorch may give NaN for it; as it contributes to no gradient, the rest is
    the same without it. Its own rows of the result are what they must be: 0 and -inf.
    """
    sees = seen_ST.any(-1)
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    q, k, v = leaves
    per_head = q.shape[1] // k.shape[1]
    q = q[:, :, sees]
    k, v = k.repeat_interleave(per_head, 1), v.repeat_interleave(per_head, 1)
    out = given.dout.new_zeros(given.dout.shape)
    lse = given.dout.new_full(given.dout.shape[:3], -torch.inf, dtype=wide(q.dtype))
    if sees.any():
        rows, mask = sees.nonzero()[:, 0], seen_ST[sees]
        scores = q.to(lse.dtype) @ k.to(lse.dtype).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        out = out.index_copy(2, rows, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
        lse = lse.index_copy(2, rows, scores.masked_fill(~mask, -torch.inf).logsumexp(-1))
    return _results(rs.Partial(out, lse), leaves, given.dout, given.dlse)


def _results(result: rs.Partial, leaves: Sequence[Tensor], dout: Tensor, dlse: Tensor | None) -> Results:
    """Forward and backward: the gradients of ``sum(out * dout) + sum(lse * dlse)``."""
    outputs, weights = ([result.out], [dout]) if dlse is None else ([*result], [dout, dlse])
    if not any(x.requires_grad for x in outputs):  # nobody sees anything
        return Results(*result, *(torch.zeros_like(x) for x in leaves))
    grads = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    filled = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True))
    return Results(result.out.detach(), result.lse.detach(), *filled)


# -- comparing ---------------------------------------------------------------------------------------------------------


def allowances(case: Case, given: Tensors, seen_ST: Tensor, truth: Results) -> dict[str, float]:
    """For each result, how far off it may be, as :class:`Figure` counts."""
    if case.dtype == "float64":
        return dict.fromkeys(Results._fields, EXACT)
    alone = compare(torch_alone(given, seen_ST, case.scale), truth, dict.fromkeys(Results._fields, 0.0))
    rounded, summed = (terms(given, truth, seen_ST, case.scale, recomputed=x) for x in (False, True))
    sums = torch.finfo(torch.float32).eps
    allowed = {}
    for name in Results._fields:
        eps = sums if name == "lse" else torch.finfo(given.q.dtype).eps
        floor = FLOOR_ULPS * (eps * _largest(getattr(rounded, name)) + sums * _largest(getattr(summed, name)))
        allowed[name] = TIMES_TORCH * alone[name].error + floor / max(1.0, _largest(getattr(truth, name)))
    return allowed


def terms(given: Tensors, truth: Results, seen_ST: Tensor, scale: float | None, *, recomputed: bool) -> Results:
    """How large the terms are whose sum each result is: the root of the sum of their squares, as errors of rounding add up.

    ``recomputed``: the weight of a key is found again as exp(score - lse), so that it is as inexact as the exponent is large.
    """
    q, k, v, dout = (x.double().abs() for x in given[:4])
    per_head = q.shape[1] // k.shape[1]
    k, v, signed_k = (x.repeat_interleave(per_head, 1) for x in (k, v, given.k.double()))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lse_BHS1 = truth.lse.nan_to_num(neginf=0.0).unsqueeze(-1)
    exponent_BHST = lse_BHS1.abs() + q @ k.mT * scale
    weight_BHST = (given.q.double() @ signed_k.mT * scale - lse_BHS1).masked_fill(~seen_ST, -torch.inf).exp()
    weight_BHST = weight_BHST * (1.0 + exponent_BHST) if recomputed else weight_BHST
    dscore_BHST = weight_BHST * (dout @ v.mT + (dout * truth.out.abs()).sum(-1, keepdim=True) + 1.0) * scale

    def of_keys(squares_BHTD: Tensor) -> Tensor:
        return squares_BHTD.unflatten(1, (-1, per_head)).sum(2).sqrt()

    return Results(
        out=(weight_BHST**2 @ v**2).sqrt(),
        lse=exponent_BHST.masked_fill(~seen_ST, 0.0),
        dq=(dscore_BHST**2 @ k**2).sqrt(),
        dk=of_keys((dscore_BHST**2).mT @ q**2),
        dv=of_keys((weight_BHST**2).mT @ dout**2),
    )


def compare(got: Results, truth: Results, allowed: dict[str, float], *, whole: Results | None = None) -> dict[str, Figure]:
    """The errors of the results. A NaN, or a -inf that is not where it should be, is infinitely far off.

    ``whole``: where the results are of some tokens only, what they should be for all, for the sake of its largest magnitude.
    """
    figures = {}
    for name in Results._fields:
        is_, should = getattr(got, name).double(), getattr(truth, name)
        if is_.shape != should.shape:
            figures[name] = Figure(torch.inf, allowed[name])
            continue
        off = (is_ - should).abs().masked_fill(is_.isneginf() & should.isneginf(), 0.0)
        off = off.masked_fill(off.isnan(), torch.inf)
        largest = _largest(should if whole is None else getattr(whole, name))
        figures[name] = Figure(float(off.max()) / max(1.0, largest) if off.numel() else 0.0, allowed[name])
    return figures


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _too_far(figures: dict[str, Figure]) -> list[str]:
    far = {name: figure for name, figure in figures.items() if not figure.error <= figure.allowed}
    return [f"{name} is {figure.error:.2e} off, {figure.allowed:.2e} allowed" for name, figure in far.items()]


def _proof(plan: rs.Plan, case: Case) -> list[str]:
    try:
        plan.for_heads(case.heads, case.kv_heads).verify()
    except rs.PlanError as error:
        return [f"verify: {error}"]
    return []


def _bytes(plan: rs.Plan, case: Case, moved: Traffic) -> list[str]:
    """The bytes that a rank really moved are those its plan says."""
    shape = rs.Shape(
        batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, v_dim=case.v_dim, dtype=case.dtype
    )
    planned = tuple(map(sum, zip(*(bytes_moved(plan, shape, phase) for phase in PHASES), strict=True)))
    if planned == (moved.sent, moved.received):
        return []
    return [f"rank {plan.rank} sent and received {moved.sent} and {moved.received} bytes, its plan says {planned}"]
