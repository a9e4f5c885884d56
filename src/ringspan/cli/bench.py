"""``ringspan bench``: measure this machine. One line of JSON for each case, and a table for people."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringspan as rs
from ringspan.bench import calibrate as bench_calibrate
from ringspan.bench import cost as bench_cost
from ringspan.bench import layouts as bench_layouts
from ringspan.bench import plan as bench_plan
from ringspan.bench import rank as bench_rank
from ringspan.testing.workers import Pool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="what", required=True)
    cpu = what.add_parser("cpu", help="processes of one thread each against one process of one thread, forward + backward")
    cpu.add_argument("--world", type=int, default=2, help="how many processes (default 2; no more than you have cores)")
    cpu.add_argument("--seq-len", type=int, default=8192, help="tokens (default 8192)")
    cpu.add_argument("--heads", type=int, default=8, help="query and key heads (default 8)")
    cpu.add_argument("--head-dim", type=int, default=64, help="head dim (default 64)")
    cpu.add_argument("--rounds", type=int, default=5, help="rounds, each measuring both sides (default 5)")
    cpu.add_argument("--strategies", nargs="+", default=["ring", "gather", "exchange"], help="default: ring gather exchange")
    plans = what.add_parser("plan", help="how long planning takes: masks of a batch on 8 ranks, and a large one on 64")
    bench_plan.add_arguments(plans)
    rank = what.add_parser(
        "rank",
        help="what one rank's share costs against the whole on one device, without the wire",
        description=bench_rank.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_rank.add_arguments(rank)
    layouts = what.add_parser("layouts", help="how layouts share packed documents: balance, pieces, keys to fetch")
    bench_layouts.add_arguments(layouts)
    calibrate = what.add_parser("calibrate", help="measure this machine for the cost model, and write a hardware file")
    bench_calibrate.add_arguments(calibrate)
    cost = what.add_parser("cost", help="what the cost model says of processes on this machine, against what they take")
    bench_cost.add_arguments(cost)
    for parser_ in (cpu, plans, rank, layouts, calibrate, cost):
        parser_.add_argument("--json", action="store_true", help="only the JSON lines, without the table")


def run(args: argparse.Namespace) -> int:
    measure, columns = BENCHES[args.what]
    cases = []
    for case in measure(args):  # each as soon as it is there: the next may take long, or fail
        record = {"ringspan": rs.__version__, "torch": torch.__version__, "machine": platform.machine(), **case}
        print(json.dumps(record), flush=True)
        cases.append(case)
    if not args.json:
        print()
        print(_table(cases, columns))
        if args.what in SUMMARIES:
            print(SUMMARIES[args.what](cases))
    return 0


# -- cpu ---------------------------------------------------------------------------------------------------------------

CPU_COLUMNS = {
    "strategy": "strategy",
    "one_s": "one process, s",
    "many_s": "split, s",
    "speedup": "speed-up",
    "spread": "spread",
}


def bench_cpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Causal attention split over processes against the same in one, in turns, so that both meet the same machine."""
    with Pool(args.world, threads=1, timeout=1800) as pool:
        cases = []
        for strategy in args.strategies:
            print(f"measuring {strategy} …", file=sys.stderr)
            rounds, digest = pool.run(_cpu_job, strategy, args.seq_len, args.heads, args.head_dim, args.rounds)[0]
            ratios = [one / many for one, many in rounds]
            cases.append(
                {
                    "bench": "cpu",
                    "mask": f"causal({args.seq_len})",
                    "layout": "zigzag",
                    "strategy": strategy,
                    "plan": digest,
                    "world": args.world,
                    "threads": 1,
                    "heads": args.heads,
                    "head_dim": args.head_dim,
                    "dtype": "float32",
                    "one_s": round(statistics.median(one for one, _ in rounds), 4),
                    "many_s": round(statistics.median(many for _, many in rounds), 4),
                    "speedup": round(statistics.median(ratios), 3),
                    "spread": f"{min(ratios):.2f}–{max(ratios):.2f}",
                }
            )
        return cases


def _cpu_job(rank: int, strategy: str, n: int, heads: int, dim: int, rounds: int) -> tuple[list[tuple[float, float]], str]:
    torch.manual_seed(0)
    cp = rs.ContextParallel(None, rs.causal(n), strategy=strategy, layout="zigzag")
    whole = torch.randn(4, 1, heads, n, dim).unbind()
    *shards, grad = cp.shard(*whole, dim=2)

    def one() -> None:
        q, k, v = (x.detach().requires_grad_() for x in whole[:3])
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(whole[3])

    def many() -> None:
        q, k, v = (x.detach().requires_grad_() for x in shards)
        cp.attention(q, k, v).backward(grad)

    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        alone = _seconds(one) if rank == 0 else 0.0
        dist.barrier()
        together = torch.tensor(_seconds(many))
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        times.append((alone, together.item()))
    return times[1:], cp.plan.digest  # the first round warms up


def _seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def _table(cases: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """The columns that any case has something for."""
    columns = {key: title for key, title in columns.items() if any(key in case for case in cases)}
    rows = [list(columns.values()), *([str(case.get(key, "")) for key in columns] for case in cases)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


BENCHES: dict[str, tuple[Callable[[argparse.Namespace], Iterable[dict[str, Any]]], dict[str, str]]] = {
    "cpu": (bench_cpu, CPU_COLUMNS),
    "plan": (bench_plan.cases, bench_plan.COLUMNS),
    "rank": (bench_rank.cases, bench_rank.COLUMNS),
    "layouts": (bench_layouts.cases, bench_layouts.COLUMNS),
    "calibrate": (bench_calibrate.cases, bench_calibrate.COLUMNS),
    "cost": (bench_cost.cases, bench_cost.COLUMNS),
}

# One line below the table.
SUMMARIES: dict[str, Callable[[list[dict[str, Any]]], str]] = {"cost": bench_cost.summary}
