"""The predictions of the cost model for processes on this machine, against measured times.

Each round times the kernel, the link and every case once, so that the model is calibrated in the same minutes in which
it is tested. The fastest round counts, for the model and for the measurement; the median shows how loaded the machine
was. On a loaded machine the wall time includes the time of other processes. *Busy* is the processor time of the busiest
rank over all its threads: without other processes, and without waiting for peers. On an idle machine with balanced work
both are equal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

import ringspan as rs
from ringspan.bench.calibration_rounds import Probes, as_round, min_over_rounds, this_machine, time_after_barrier, time_round
from ringspan.bench.rows import OnProgress, Row, ignore_progress
from ringspan.testing.workers import Pool

STRATEGIES = ("ring", "gather", "exchange(stages=1)", "exchange(stages=2)", "ulysses", "pass_q")
CLOSE = 0.15
# Repetitions in each round. The shortest counts: a shared machine is rarely idle for long.
REPEATS = 3


class CostCase(NamedTuple):
    """A layout and strategy for a mask and a number of heads. Cases with equal mask and heads are alternatives."""

    mask: rs.Mask
    heads: int
    strategy: str
    layout: str


def masks(n: int) -> list[rs.Mask]:
    shares = np.array([0.31, 0.02, 0.17, 0.09, 0.26, 0.15])
    cuts = np.round(np.cumsum(shares) * n).astype(int)
    documents = rs.documents(np.diff(cuts, prepend=0))
    return [rs.causal(n), rs.full(n), rs.causal(n) & rs.window(left=n // 8), documents]


def cost_rows(
    *,
    world: int,
    seq_len: int,
    heads: Sequence[int],
    head_dim: int,
    strategies: Sequence[str],
    layout: str,
    rounds: int,
    on_progress: OnProgress = ignore_progress,
) -> list[Row]:
    """Return a row for each mask, number of heads and strategy."""
    shape = rs.Shape(heads=heads[0], kv_heads=heads[0], head_dim=head_dim, dtype="float32")
    probes = Probes(shape=shape, tokens=tuple(seq_len // part for part in (4, 2, 1)))
    cases = [CostCase(m, h, s, layout) for m in masks(seq_len) for h in heads for s in strategies]
    timed, times = [], []
    with Pool(world, threads=1, timeout=1800) as pool:
        for n in range(rounds):
            on_progress(n, rounds, f"round {n + 1} of {rounds}: calibration and {len(cases)} cases")
            timed.append(as_round(pool.run(time_round, probes)))
            times.append(np.array(pool.run(time_cases, cases, head_dim)))
    machine = this_machine(timed, probes)
    median = np.median([seconds.max(axis=0)[:, 0] for seconds in times], axis=0)
    rows = []
    for case, (wall, busy), middle in zip(cases, min_over_rounds(times).tolist(), median.tolist(), strict=True):
        plan = rs.plan(case.mask, world=world, strategy=case.strategy, layout=case.layout).for_heads(case.heads, case.heads)
        predicted = plan.cost(machine, replace(shape, heads=case.heads, kv_heads=case.heads)).seconds
        rows.append(
            {
                "bench": "cost",
                "mask": case.mask.name,
                "world": world,
                "heads": case.heads,
                "head_dim": head_dim,
                "dtype": "float32",
                "layout": plan.q_layout.name,
                "strategy": plan.strategy,
                "plan": plan.digest,
                "rounds": rounds,
                "predicted_ms": round(predicted * 1e3, 2),
                "measured_ms": round(wall * 1e3, 2),
                "median_ms": round(middle * 1e3, 2),
                "ratio": round(predicted / wall, 3),
                "busy_ms": round(busy * 1e3, 2),
                "busy_ratio": round(predicted / busy, 3),
            }
        )
    return [row for _, work in groupby(rows, key=lambda r: (r["mask"], r["heads"])) for row in _with_choice([*work])]


def time_cases(rank: int, cases: list[CostCase], head_dim: int) -> list[tuple[float, float]]:
    """Time each case, forward + backward. A job for all workers."""
    return [time_case(case, head_dim) for case in cases]


def time_case(case: CostCase, head_dim: int) -> tuple[float, float]:
    """Return the wall time and processor time."""
    cp = rs.ContextParallel(None, case.mask, strategy=case.strategy, layout=case.layout)
    q, k, v, grad = torch.randn(4, 1, case.heads, cp.plan.q_rows, head_dim).unbind()
    qkv = [x.requires_grad_() for x in (q, k, v)]

    def step() -> float:
        start = time.process_time()
        cp.attention(*qkv).backward(grad)
        return time.process_time() - start

    step()  # warm-up: the plan for these heads, the handshake and memory
    wall, busy = zip(*(time_after_barrier(step) for _ in range(REPEATS)), strict=True)
    return min(wall), min(busy)


def _with_choice(work: list[Row]) -> list[Row]:
    """Add to the alternative that the model would choose the ratio of its time to the best one, measured and busy."""
    chosen = min(work, key=lambda r: r["predicted_ms"])
    over = {f"choice_{by}": round(chosen[f"{by}_ms"] / min(r[f"{by}_ms"] for r in work), 3) for by in ("measured", "busy")}
    return [{**row, **over} if row is chosen else row for row in work]


def summary(rows: list[Row]) -> str:
    """Return the number of close predictions and the loss of the model's choice, by wall time and by processor time."""

    def line(ratio: str, choice: str) -> str:
        close = sum(abs(r[ratio] - 1) <= CLOSE for r in rows)
        worst = max(r[choice] for r in rows if choice in r)
        return f"{close} of {len(rows)} within {CLOSE:.0%}, the model's choice takes at most {worst} × the fastest"

    return f"measured: {line('ratio', 'choice_measured')}\nbusy: {line('busy_ratio', 'choice_busy')}"
