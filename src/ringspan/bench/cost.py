"""``ringspan bench cost``: what the cost model says of this machine's processes, against what they really take.

Each round times the kernel, the link and every case once, so that the model is made in the same minutes it is held against.
Of all rounds the fastest counts, on both sides; the median is there to show how quiet the machine was. Where it was not, the
clock says what others took, too. *Busy* is the processor's time of the busiest rank, all threads together: it does not count
what others took, nor what a rank waited for its peers. On a quiet machine with evenly shared work both are the same.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

import ringspan as rs
from ringspan.bench.calibration import Probes, all_begin_alike, as_round, fastest, this_machine, time_round
from ringspan.cli.progress import Progress
from ringspan.testing.workers import Pool

COLUMNS = {
    "mask": "mask",
    "heads": "heads",
    "layout": "layout",
    "strategy": "strategy",
    "predicted_ms": "predicted, ms",
    "measured_ms": "measured, ms",
    "ratio": "ratio",
    "median_ms": "median, ms",
    "busy_ms": "busy, ms",
    "busy_ratio": "ratio to busy",
    "choice_measured": "× fastest",
    "choice_busy": "× least busy",
}

STRATEGIES = ("ring", "gather", "exchange(stages=1)", "exchange(stages=2)", "ulysses", "pass_q")
CLOSE = 0.15
# In a row, in each round: where others use the machine too, it is seldom quiet for long.
REPEATS = 3


class Case(NamedTuple):
    """One way to do one piece of work. Pieces of work are compared by mask and heads."""

    mask: rs.Mask
    heads: int
    strategy: str
    layout: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=int, default=2, help="how many processes (default 2; no more than you have cores)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens (default 2048)")
    parser.add_argument(
        "--heads", type=int, nargs="+", default=[4], help="query and key heads (default 4; several may be given)"
    )
    parser.add_argument("--head-dim", type=int, default=64, help="head dim (default 64)")
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], help=f"default: {' '.join(STRATEGIES)}")
    parser.add_argument("--layout", default="auto", help="default: auto")
    parser.add_argument("--rounds", type=int, default=10, help="rounds; the fastest counts (default 10)")


def masks(n: int) -> list[rs.Mask]:
    shares = np.array([0.31, 0.02, 0.17, 0.09, 0.26, 0.15])
    cuts = np.round(np.cumsum(shares) * n).astype(int)
    documents = rs.documents(np.diff(cuts, prepend=0))
    return [rs.causal(n), rs.full(n), rs.causal(n) & rs.window(left=n // 8), documents]


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    shape = rs.Shape(heads=args.heads[0], kv_heads=args.heads[0], head_dim=args.head_dim, dtype="float32")
    probes = Probes(shape=shape, tokens=tuple(args.seq_len // part for part in (4, 2, 1)))
    tried = [Case(m, h, s, args.layout) for m in masks(args.seq_len) for h in args.heads for s in args.strategies]
    with Pool(args.world, threads=1, timeout=1800) as pool, Progress(args.rounds) as bar:
        rounds, times = [], []
        for n in range(args.rounds):
            bar.update(n, f"round {n + 1} of {args.rounds}: {len(tried)} cases, and the machine itself")
            rounds.append(as_round(pool.run(time_round, probes)))
            times.append(np.array(pool.run(time_cases, tried, args.head_dim)))
        bar.update(args.rounds, "done")
    machine = this_machine(rounds, probes)
    median = np.median([seconds.max(axis=0)[:, 0] for seconds in times], axis=0)
    predicted = []
    for case in tried:
        made = rs.plan(case.mask, world=args.world, strategy=case.strategy, layout=case.layout)
        predicted.append(made.cost(machine, replace(shape, heads=case.heads, kv_heads=case.heads)).seconds)
    records = [_record(*x, args) for x in zip(tried, predicted, fastest(times).tolist(), median.tolist(), strict=True)]
    return [record for _, work in groupby(records, key=lambda r: (r["mask"], r["heads"])) for record in _with_choice([*work])]


def time_cases(rank: int, tried: list[Case], head_dim: int) -> list[tuple[float, float]]:
    """A job for all workers: each case, forward + backward."""
    return [time_case(case, head_dim) for case in tried]


def time_case(case: Case, head_dim: int) -> tuple[float, float]:
    """By the clock, and by the processor."""
    cp = rs.ContextParallel(None, case.mask, strategy=case.strategy, layout=case.layout)
    q, k, v, grad = torch.randn(4, 1, case.heads, cp.plan.q_rows, head_dim).unbind()
    qkv = [x.requires_grad_() for x in (q, k, v)]

    def step() -> float:
        start = time.process_time()
        cp.attention(*qkv).backward(grad)
        return time.process_time() - start

    step()  # plans for these heads, shakes hands, takes memory
    by_clock, by_processor = zip(*(all_begin_alike(step) for _ in range(REPEATS)), strict=True)
    return min(by_clock), min(by_processor)


def _record(
    case: Case, predicted: float, measured: tuple[float, float], median: float, args: argparse.Namespace
) -> dict[str, Any]:
    by_clock, busy = measured
    made = rs.plan(case.mask, world=args.world, strategy=case.strategy, layout=case.layout)
    plan = made.for_heads(case.heads, case.heads)
    return {
        "bench": "cost",
        "mask": case.mask.name,
        "world": args.world,
        "heads": case.heads,
        "head_dim": args.head_dim,
        "dtype": "float32",
        "layout": plan.q_layout.name,
        "strategy": plan.strategy,
        "plan": plan.digest,
        "rounds": args.rounds,
        "predicted_ms": round(predicted * 1e3, 2),
        "measured_ms": round(by_clock * 1e3, 2),
        "median_ms": round(median * 1e3, 2),
        "ratio": round(predicted / by_clock, 3),
        "busy_ms": round(busy * 1e3, 2),
        "busy_ratio": round(predicted / busy, 3),
    }


def _with_choice(work: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside the candidate that the model would take: what it took over the best of all, by the clock and by the processor."""
    chosen = min(work, key=lambda r: r["predicted_ms"])
    over = {f"choice_{by}": round(chosen[f"{by}_ms"] / min(r[f"{by}_ms"] for r in work), 3) for by in ("measured", "busy")}
    return [{**record, **over} if record is chosen else record for record in work]


def summary(records: list[dict[str, Any]]) -> str:
    """How many predictions are close, and how much the model's choice loses; by the clock, then by the processor."""

    def said(ratio: str, choice: str) -> str:
        close = sum(abs(r[ratio] - 1) <= CLOSE for r in records)
        worst = max(r[choice] for r in records if choice in r)
        return f"{close} of {len(records)} within {CLOSE:.0%}, what the model would choose takes at most {worst} × the fastest"

    return f"measured: {said('ratio', 'choice_measured')}\nbusy: {said('busy_ratio', 'choice_busy')}"
