"""Measure `rs.interleave` over gloo: two batches of packed documents, one after the other and in flight together.

    python benchmarks/interleave.py             2 and 4 processes on this machine
    python benchmarks/interleave.py --world 2
    python benchmarks/interleave.py --json      a line of JSON for each number of processes

The figures are the median of the seconds of one attention layer, forward and backward, of both batches. Rounds of the
two ways alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch

import ringspan as rs
from ringspan.testing.workers import Pool

LENGTHS = [1500, 300, 900, 1396], [2100, 700, 1296]
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, action="append", help="processes (default: 2, then 4)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each number of processes")
    args = parser.parse_args()
    for world in args.world or (2, 4):
        with Pool(world) as pool:
            apart, together = (max(times) for times in zip(*pool.run(measure, args.rounds), strict=True))
        figures = {"world": world, "torch": torch.__version__, "lengths": LENGTHS, "rounds": args.rounds}
        row = {**figures, "one_after_the_other_s": round(apart, 5), "interleaved_s": round(together, 5)}
        text = f"{world} processes: {apart:.4f} s one after the other, {together:.4f} s interleaved"
        print(json.dumps(row) if args.json else text, flush=True)
    return 0


def measure(rank: int, rounds: int) -> tuple[float, float]:
    a, b = (
        rs.ContextParallel(None, rs.documents(lengths), strategy="exchange(stages=2)", layout="balanced") for lengths in LENGTHS
    )
    both = rs.interleave(a, b)
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, both.plan.q_rows, HEAD_DIM).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)]
    rows = [a.plan.q_rows, b.plan.q_rows]

    def one_after_the_other() -> None:
        for cp, part in zip((a, b), zip(*(x.split(rows, dim=2) for x in inputs), strict=True), strict=True):
            cp.attention(*part).sum().backward()

    def interleaved() -> None:
        both.attention(*inputs).sum().backward()

    found: dict[str, list[float]] = {}
    for _ in range(rounds + 2):
        for way in (one_after_the_other, interleaved):
            a.group.all_reduce_sum(torch.zeros(1))  # all ranks begin together
            start = time.perf_counter()
            way()
            found.setdefault(way.__name__, []).append(time.perf_counter() - start)
    return tuple(statistics.median(times[2:]) for times in found.values())  # type: ignore[return-value]


if __name__ == "__main__":
    sys.exit(main())
