"""The results of a study as one JSON object, from which text and page are made."""

from __future__ import annotations

import platform
from dataclasses import asdict, replace
from typing import Any

import numpy as np

import ringspan as rs
from ringspan.cli.plan.study import FewerRanks, Study
from ringspan.costs.plan_cost import flops_per_pair
from ringspan.layouts import balance
from ringspan.planner import Candidate, bytes_moved, peak_bytes
from ringspan.plans.data import PHASES


def facts(study: Study) -> dict[str, Any]:
    """Return the results. Seconds are those of the slowest simulated rank; ``exact`` says whether all ranks were
    simulated. The candidates have the costs with which they were compared."""
    question, cost, plan = study.question, study.cost, study.plans[0]
    return {
        "ringspan": rs.__version__,
        "python": platform.python_version(),
        "mask": {
            "name": question.mask.name,
            "queries": question.mask.lengths[0],
            "keys": question.mask.lengths[1],
            "area": question.mask.area,
            "bands": len(question.mask),
            "share": question.mask.area / max(1, question.mask.lengths[0] * question.mask.lengths[1]),
        },
        "world": question.world,
        "hardware": asdict(question.machine),
        "shape": asdict(question.shape),
        "chosen": {
            **_candidate(replace(study.best, cost=cost)),
            "digest": plan.digest,
            "balance": _balance(study),
            **_throughput(study),
        },
        "exact": cost.is_exact,
        "costed_ranks": list(cost.ranks),
        "candidates": [_candidate(candidate) for candidate in study.choice.candidates],
        "fewer_ranks": [_fewer(fewer, study) for fewer in study.fewer],
        "ranks": _ranks(study),
        "notes": list(study.notes),
    }


def _throughput(study: Study) -> dict[str, float | None]:
    """Return tokens and FLOP/s of forward and backward, the share of the kernel's best speed, and the speed-up over one
    rank, which is None if one rank has too little memory or was not compared."""
    question, seconds, machine = study.question, study.cost.seconds, study.question.machine
    forward, backward = (question.mask.area * question.shape.heads * flops_per_pair(question.shape, phase) for phase in PHASES)
    fastest = (forward / machine.forward.best + backward / machine.backward.best) / question.world
    one_rank_s = seconds if question.world == 1 else None
    if study.fewer and study.fewer[0].best and study.fewer[0].best.cost:
        one_rank_s = study.fewer[0].best.cost.seconds
    return {
        "tokens_per_s": question.shape.batch * question.mask.lengths[0] / seconds,
        "flops_per_s_of_rank": (forward + backward) / seconds / question.world,
        "share_of_kernel_speed": fastest / seconds,
        "one_rank_s": one_rank_s,
        "speedup": one_rank_s and one_rank_s / seconds,
    }


def _fewer(fewer: FewerRanks, study: Study) -> dict[str, Any]:
    """Return the figures of the fastest plan for fewer ranks, and how much faster all ranks are."""
    cost = fewer.best and fewer.best.cost
    return {
        "world": fewer.world,
        "strategy": fewer.best and fewer.best.strategy,
        "layout": fewer.best and fewer.best.layout.name,
        "seconds": cost and cost.seconds,
        "peak_bytes": cost and cost.peak_bytes,
        "speedup": cost and cost.seconds / study.cost.seconds,
        "rejected": fewer.reason,
    }


def _balance(study: Study) -> float:
    """Return the work of the busiest rank relative to the mean."""
    plan = study.plans[0]
    if plan.program.heads is None:
        return balance(study.question.mask, plan.q_layout)
    return max(plan.work for plan in study.plans)


def _candidate(candidate: Candidate) -> dict[str, Any]:
    """Return the figures of a candidate; None where a candidate was rejected before it was costed."""
    cost = candidate.cost
    return {
        "strategy": candidate.strategy,
        "layout": candidate.layout.name,
        "seconds": cost and cost.seconds,
        "forward_s": cost and cost.forward.seconds,
        "backward_s": cost and cost.backward.seconds,
        "exposed_s": cost and cost.exposed_s,
        "peak_bytes": cost and cost.peak_bytes,
        "exact": cost and cost.is_exact,
        "simulated_ranks": cost and len(cost.ranks),
        "rejected": candidate.rejected,
    }


def _ranks(study: Study) -> list[dict[str, Any]]:
    """Return, for each simulated rank: its rows, its work (relative to the mean of all ranks), its bytes and its
    exposed time."""
    shape, lines = study.question.shape, (study.cost.forward, study.cost.backward)
    computing = [(line.computed - line.begin).sum(axis=1) for line in lines]
    exposed = np.sum([line.exposed for line in lines], axis=0)
    rows = []
    for row, plan in enumerate(study.plans):
        moved = np.sum([bytes_moved(plan, shape, phase) for phase in PHASES], axis=0)
        rows.append(
            {
                "rank": plan.rank,
                "queries": plan.q_rows,
                "keys": plan.kv_rows,
                "work": plan.work,
                "forward_computing_s": float(computing[0][row]),
                "backward_computing_s": float(computing[1][row]),
                "exposed_s": float(exposed[row]),
                "sent_bytes": int(moved[0]),
                "received_bytes": int(moved[1]),
                "peak_bytes": max(peak_bytes(plan, shape, phase) for phase in PHASES),
            }
        )
    return rows
