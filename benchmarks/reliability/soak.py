"""Many calls over changing masks and strategies on four workers, each compared with dense attention.

    python -m benchmarks.reliability.soak [--trials N] [--pools N] [--jobs N]

A call is a forward or a backward pass. Every rank draws the same masks. The memory is the largest of the four.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any, NamedTuple

import torch

import ringspan as rs
from benchmarks.reliability.experiments import Experiment, Rows, main_of, parser_of
from benchmarks.reliability.processes import resident_mib
from ringspan.kernels.reference import dense_attention
from ringspan.testing.workers import Pool

WORLD, TOLERANCE = 4, 2e-5
CHUNK = 200  # calls of one job of the pool
STRATEGIES = ("ring", "gather", "exchange", "pass_q", "ulysses", "auto")


class Part(NamedTuple):
    """What a rank did in some calls, and its memory at their end."""

    calls: int
    compared: int
    wrong: int
    worst: float
    mib: float


def attend(rank: int, calls: int, seed: int) -> Part:
    """Attend under random masks. A job for all workers of a pool."""
    rng, compared, wrong, worst = random.Random(seed), 0, 0, 0.0
    for n in range(calls // 2):
        lengths = [rng.randint(1, 24) for _ in range(rng.randint(2, 6))]
        mask = rng.choice((rs.documents(lengths), rs.causal(sum(lengths)), rs.documents(lengths) & rs.window(left=5)))
        layout = rng.choice(("zigzag", "balanced", "contiguous"))
        cp = rs.ContextParallel(None, mask, strategy=rng.choice(STRATEGIES), layout=layout)
        torch.manual_seed(rng.randrange(10**9))
        whole = torch.randn(3, 1, 4, sum(lengths), 8)
        leaves = [x.requires_grad_() for x in cp.shard(*whole.unbind(), dim=2)]
        out = cp.attention(*leaves)
        out.square().sum().backward()
        if n % 4 == 0:
            dense = [x.double().requires_grad_() for x in whole.unbind()]
            expected = dense_attention(*dense, torch.from_numpy(mask.dense())).out
            expected.square().sum().backward()
            grads = [x.grad for x in dense]
            parts = zip((out, *(x.grad for x in leaves)), cp.shard(expected.detach(), *grads, dim=2), strict=True)
            error = max(((a - b).abs().max() / (1 + b.abs().max())).item() if b.numel() else 0.0 for a, b in parts)
            compared, wrong, worst = compared + 1, wrong + (not error < TOLERANCE), max(worst, error)
    return Part(calls // 2 * 2, compared, wrong, worst, resident_mib())


def run_pool(number: int, calls: int, deadline: float) -> list[list[list[Part]]]:
    """Make calls on a pool of its own. Returns the parts of each rank, in the order of time."""
    found: list[list[Part]] = [[] for _ in range(WORLD)]
    with Pool(WORLD, timeout=600) as pool:
        for n, first in enumerate(range(0, calls, CHUNK)):
            if time.monotonic() > deadline:
                break
            for parts, part in zip(found, pool.run(attend, min(CHUNK, calls - first), 1000 * number + n), strict=True):
                parts.append(part)
    return [found]


def rows_of(pools: list[list[list[Part]]]) -> Rows:
    rows: Rows = []
    for number, ranks in enumerate(pools):
        warm, end = (max(parts[n].mib for parts in ranks) for n in (len(ranks[0]) // 5, -1))
        row: dict[str, Any] = {"case": f"pool {number}", "calls": sum(part.calls for part in ranks[0])}
        row["compared"] = sum(part.compared for part in ranks[0])
        row["wrong"] = sum(part.wrong for parts in ranks for part in parts)
        row["largest error"] = f"{max(part.worst for parts in ranks for part in parts):.1e}"
        row |= {"MiB after warm-up": round(warm), "MiB at the end": round(end)}
        rows.append(row)
    return rows


def calls_of(pools: list[list[list[Part]]]) -> int:
    return sum(part.calls for ranks in pools for part in ranks[0])


def experiment(calls: int, pools: int = 1) -> Experiment:
    each = -(-calls // pools)
    tasks = [partial(run_pool, n, each) for n in range(pools)]
    return Experiment(name="soak", tasks=tasks, rows=rows_of, goal=each * pools, count=calls_of, is_long=True)


def main() -> None:
    parser = parser_of(__doc__, 20_000)
    parser.add_argument("--pools", type=int, default=1, help="pools that share the calls (default %(default)s)")
    args = parser.parse_args()
    main_of([experiment(args.trials, args.pools)], args)


if __name__ == "__main__":
    main()
