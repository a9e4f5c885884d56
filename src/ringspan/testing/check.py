"""Run random cases of attention on several ranks and compare every result with dense attention in float64.

Compared are out, lse and the gradients of q, k and v (:mod:`ringspan.testing.comparison`). Each case also runs the
plan's own verification, and the bytes that were sent must be those of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import ringspan as rs
from ringspan.masks.expressions import parse_mask
from ringspan.planner import bytes_moved
from ringspan.plans.data import PHASES
from ringspan.testing.comparison import Figure, Results, allowances, compare, dense, results_of, tensors
from ringspan.testing.fuzz import Case
from ringspan.testing.threads import one_thread
from ringspan.testing.workers import Pool, WorkerFailed, send_message
from ringspan.transports import ProcessGroupTransport, Traffic, as_transport

# The number of cases that the workers run before they report.
BATCH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The errors of a case. ``problems`` is empty if the case passed."""

    case: Case
    figures: dict[str, Figure]
    problems: tuple[str, ...]

    @property
    def worst(self) -> float:
        return max((figure.error for figure in self.figures.values()), default=0.0)


# -- one case ----------------------------------------------------------------------------------------------------------


def run_local(case: Case) -> CaseResult:
    """Run a case with all ranks in this process."""
    mask = parse_mask(case.mask)
    given, seen = tensors(case, mask), torch.from_numpy(mask.dense())
    expected = dense(given, seen, case.scale)
    world = rs.LocalWorld(case.world)
    plans = world.plans(mask, strategy=case.strategy, layout=case.layout, kv_layout=case.kv_layout)
    problems = _verify(plans[0], case)
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    got = results_of(world.run(plans, *leaves, scale=case.scale), leaves, given.dout, given.dlse)
    for plan, traffic in zip(plans, world.traffic, strict=True):
        problems += _check_bytes(plan, case, traffic)
    figures = compare(got, expected, allowances(case, given, seen, expected))
    return CaseResult(case=case, figures=figures, problems=(*problems, *_too_far(figures)))


def run_rank(case: Case, group: ProcessGroupTransport) -> CaseResult:
    """Run a case on this process's rank of a group, compared for this rank's tokens. Every rank of the group must run
    it."""
    mask = parse_mask(case.mask)
    given, seen = tensors(case, mask), torch.from_numpy(mask.dense())
    expected = dense(given, seen, case.scale)
    cp = rs.ContextParallel(group, mask, strategy=case.strategy, layout=case.layout, kv_layout=case.kv_layout)
    # Verification gives the same answer on every rank: the ranks take turns.
    problems = _verify(cp.plan, case) if case.index % group.world == group.rank else []
    q, dout = cp.shard(given.q, given.dout, dim=2)
    k, v = cp.shard(given.k, given.v, dim=2, of="kv")
    dlse = None if given.dlse is None else cp.shard(given.dlse, dim=2)
    before = Traffic(group.traffic.sent, group.traffic.received)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    result = rs.attention(*leaves, plan=cp.plan, group=group, scale=case.scale, return_lse=True)
    got = results_of(result, leaves, dout, dlse)
    moved = Traffic(group.traffic.sent - before.sent, group.traffic.received - before.received)
    problems += _check_bytes(cp.plan, case, moved)
    of_rank = Results(
        *cp.shard(expected.out, expected.lse, expected.dq, dim=2),
        *cp.shard(expected.dk, expected.dv, dim=2, of="kv"),
    )
    figures = compare(got, of_rank, allowances(case, given, seen, expected), whole=expected)
    return CaseResult(case=case, figures=figures, problems=(*problems, *_too_far(figures)))


def _too_far(figures: dict[str, Figure]) -> list[str]:
    far = {name: figure for name, figure in figures.items() if not figure.error <= figure.allowed}
    return [f"{name} is off by {figure.error:.2e}, {figure.allowed:.2e} allowed" for name, figure in far.items()]


def _verify(plan: rs.Plan, case: Case) -> list[str]:
    try:
        plan.for_heads(case.heads, case.kv_heads).verify()
    except rs.PlanError as error:
        return [f"verify: {error}"]
    return []


def _check_bytes(plan: rs.Plan, case: Case, moved: Traffic) -> list[str]:
    """Return the bytes that a rank moved must be those of its plan."""
    shape = rs.Shape(
        batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, v_dim=case.v_dim, dtype=case.dtype
    )
    planned = tuple(map(sum, zip(*(bytes_moved(plan, shape, phase) for phase in PHASES), strict=True)))
    if planned == (moved.sent, moved.received):
        return []
    return [f"rank {plan.rank} sent and received {moved.sent} and {moved.received} bytes, its plan says {planned}"]


# -- many cases --------------------------------------------------------------------------------------------------------


def run_in_this_process(cases: Sequence[Case]) -> Iterator[CaseResult]:
    with one_thread():
        for case in cases:
            try:
                yield run_local(case)
            except Exception as error:  # any error is a failure of this case; the other cases still run
                yield _failed(case, f"{type(error).__name__}: {error}")


def run_in_processes(cases: Sequence[Case], world: int) -> Iterator[CaseResult]:
    """Run the cases on a pool of workers. The result of a case is the worst of all ranks. Stops when a worker
    raises."""
    with Pool(world) as pool:
        for first in range(0, len(cases), BATCH):
            batch = cases[first : first + BATCH]
            begun = dict.fromkeys(range(world), 0)
            try:
                by_rank = pool.run(_run_batch, batch, on_message=begun.__setitem__)
            except WorkerFailed as error:
                # A rank that raised leaves the others waiting in the same case: no rank is a case ahead of all others.
                yield _failed(batch[min(begun.values())], str(error))
                return
            yield from map(_worst_of_ranks, zip(*by_rank, strict=True))


def _run_batch(rank: int, cases: Sequence[Case]) -> list[CaseResult]:
    group = as_transport(None)
    results = []
    for nth, case in enumerate(cases):
        send_message(nth)
        results.append(run_rank(case, group))
    return results


def _worst_of_ranks(of_ranks: Sequence[CaseResult]) -> CaseResult:
    figures = {name: max(r.figures[name] for r in of_ranks) for name in of_ranks[0].figures}
    problems = tuple(f"rank {rank}: {problem}" for rank, r in enumerate(of_ranks) for problem in r.problems)
    return CaseResult(case=of_ranks[0].case, figures=figures, problems=problems)


def _failed(case: Case, text: str) -> CaseResult:
    return CaseResult(case=case, figures={}, problems=(f"raised {text}",))
