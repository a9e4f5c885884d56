"""Many calls over changing masks and strategies on four workers, each compared with dense attention.

    python -m benchmarks.reliability.soak [--trials N] [--json]

A call is a forward or a backward pass. Every rank draws the same masks. The memory is that of rank 0.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import torch

import ringspan as rs
from benchmarks.reliability.harness import parser_of, print_table, resident_mib
from ringspan.kernels.reference import dense_attention
from ringspan.testing.workers import Pool

WORLD, TOLERANCE = 4, 2e-5
STRATEGIES = ("ring", "gather", "exchange", "pass_q", "ulysses", "auto")


def attend(rank: int, calls: int) -> dict[str, Any]:
    """Attend under random masks. A job for all workers of a pool."""
    rng, start, warm, wrong, worst = random.Random(1), time.monotonic(), 0.0, 0, 0.0
    for n in range(calls // 2):
        if n == calls // 10:
            warm = resident_mib()
        lengths = [rng.randint(1, 24) for _ in range(rng.randint(2, 6))]
        mask = rng.choice((rs.documents(lengths), rs.causal(sum(lengths)), rs.documents(lengths) & rs.window(left=5)))
        layout = rng.choice(("zigzag", "balanced", "contiguous"))
        cp = rs.ContextParallel(None, mask, strategy=rng.choice(STRATEGIES), layout=layout)
        torch.manual_seed(n)
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
            wrong, worst = wrong + (not error < TOLERANCE), max(worst, error)
    return {
        "calls": calls // 2 * 2,
        "compared": (calls // 2 + 3) // 4,
        "wrong": wrong,
        "largest error": f"{worst:.1e}",
        "MiB after warm-up": round(warm),
        "MiB at the end": round(resident_mib()),
        "seconds": round(time.monotonic() - start),
    }


def main() -> None:
    args = parser_of(__doc__, 20_000).parse_args()
    with Pool(WORLD, timeout=7200) as pool:
        results = pool.run(attend, args.trials)
    result = {**results[0], "wrong": sum(r["wrong"] for r in results)}
    if args.json:
        print(json.dumps(result))
    else:
        print_table(["", *result], [["all", *(f"{x:,}" if isinstance(x, int) else x for x in result.values())]])


if __name__ == "__main__":
    main()
