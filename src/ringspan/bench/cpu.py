"""Causal attention split over processes against the same attention in one process, forward and backward.

Each process computes with one thread. Both sides are measured alternately, so that the load of the machine affects both
alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringspan as rs
from ringspan.bench.rows import OnProgress, Row, ignore_progress
from ringspan.testing.workers import Pool, send_message


def cpu_rows(
    *,
    world: int,
    seq_len: int,
    heads: int,
    head_dim: int,
    strategies: Sequence[str],
    rounds: int,
    on_progress: OnProgress = ignore_progress,
) -> Iterator[Row]:
    """Yield a row for each strategy."""
    for strategy in strategies:
        rs.plan(rs.causal(seq_len), world=world, strategy=strategy, layout="zigzag")  # an unknown one raises here
    total = len(strategies) * (rounds + 1)
    with Pool(world, threads=1, timeout=1800) as pool:
        for n, strategy in enumerate(strategies):
            show = partial(_show_round, on_progress, n * (rounds + 1), total, strategy)
            show(0, -1)
            times, digest = pool.run(_time_strategy, strategy, seq_len, heads, head_dim, rounds, on_message=show)[0]
            ratios = [one / split for one, split in times]
            one_s, many_s = (statistics.median(side) for side in zip(*times, strict=True))
            yield {
                "bench": "cpu",
                "mask": f"causal({seq_len})",
                "layout": "zigzag",
                "strategy": strategy,
                "plan": digest,
                "world": world,
                "threads": 1,
                "heads": heads,
                "head_dim": head_dim,
                "dtype": "float32",
                "one_s": round(one_s, 4),
                "many_s": round(many_s, 4),
                "speedup": round(one_s / many_s, 3),
                "spread": f"{min(ratios):.2f}–{max(ratios):.2f}",
            }


def _show_round(on_progress: OnProgress, before: int, total: int, strategy: str, _: int, finished: int) -> None:
    """Show that a round of a strategy has ended. Round 0 is the warm-up."""
    on_progress(before + finished + 1, total, f"measuring {strategy}" + f", round {finished}" * (finished > 0))


def _time_strategy(
    rank: int, strategy: str, n: int, heads: int, head_dim: int, rounds: int
) -> tuple[list[tuple[float, float]], str]:
    """Return the seconds in one process and split, for each round, and the digest of the plan. A job for all
    workers."""
    torch.manual_seed(0)
    cp = rs.ContextParallel(None, rs.causal(n), strategy=strategy, layout="zigzag")
    whole = torch.randn(4, 1, heads, n, head_dim).unbind()
    *shards, grad = cp.shard(*whole, dim=2)

    def attend_whole() -> None:
        q, k, v = (x.detach().requires_grad_() for x in whole[:3])
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(whole[3])

    def attend_split() -> None:
        q, k, v = (x.detach().requires_grad_() for x in shards)
        cp.attention(q, k, v).backward(grad)

    times = []
    for n_round in range(rounds + 1):
        dist.barrier()
        one = _seconds(attend_whole) if rank == 0 and n_round > 0 else 0.0
        dist.barrier()
        split = torch.tensor(_seconds(attend_split))
        dist.all_reduce(split, op=dist.ReduceOp.MAX)
        times.append((one, split.item()))
        if rank == 0:
            send_message(n_round)
    return times[1:], cp.plan.digest  # round 0 is the warm-up of the split side: its first call compares plans


def _seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
