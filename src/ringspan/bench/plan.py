"""``ringspan bench plan``: how long planning takes from nothing, in seconds of one core."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ringspan as rs
from ringspan.layouts import balance

COLUMNS = {
    "mask": "mask",
    "world": "ranks",
    "layout": "layout",
    "strategy": "strategy",
    "balance": "balance",
    "one_rank_ms": "one rank, ms",
    "all_ranks_s": "all ranks, s",
}

AUTO = ("auto", "auto")
# What a new batch costs in training: 131,072 tokens on a node of 8, everything to be chosen.
BATCH_TOKENS, BATCH_RANKS, BATCH_DOCUMENTS = 131072, 8, (28, 200)
ROUNDS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=int, default=1000, help="of the large mask (default 1000)")
    parser.add_argument("--seq-len", type=int, default=1048576, help="tokens of the large mask (default 1048576)")
    parser.add_argument("--world", type=int, default=64, help="ranks for the large mask (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the documents' lengths (default 0)")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Masks of a batch with everything to be chosen, then a large one with layouts and strategies given."""
    rs.plan(rs.documents([3, 5]), world=2)  # so that the first case does not pay for first uses
    n = BATCH_TOKENS
    packed = [_lengths(n, count, args.seed) for count in BATCH_DOCUMENTS]
    batches: list[Callable[[], rs.Mask]] = [
        lambda: rs.causal(n),
        lambda: rs.causal(n) & rs.window(left=4096),
        *(lambda lengths=lengths: rs.documents(lengths) for lengths in packed),
    ]
    large = _lengths(args.seq_len, args.documents, args.seed)
    ways = (AUTO, ("zigzag", "exchange"), ("zigzag", "ring"), ("round_robin", "exchange"), ("contiguous", "gather"))
    return [
        *(_case(mask, BATCH_RANKS, *AUTO) for mask in batches),
        *(_case(lambda: rs.documents(large), args.world, *way) for way in ways),
    ]


def _lengths(tokens: int, documents: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, tokens), documents - 1, replace=False))
    lengths: list[int] = np.diff(np.concatenate([[0], cuts, [tokens]])).tolist()
    return lengths


def _case(mask: Callable[[], rs.Mask], world: int, layout: str, strategy: str) -> dict[str, Any]:
    def plan(rank: int) -> rs.Plan:
        return rs.plan(mask(), world=world, rank=rank, layout=layout, strategy=strategy)

    one = []
    for rank in np.linspace(0, world - 1, ROUNDS).astype(int).tolist():
        rs.clear_caches()
        one.append(_seconds(lambda rank=rank: plan(rank)))  # type: ignore[misc]
    rs.clear_caches()
    everyone = _seconds(lambda: [plan(rank) for rank in range(world)])
    made = plan(0)
    return {
        "bench": "plan",
        "mask": made.mask.name,
        "world": world,
        "layout": made.q_layout.name if layout != "auto" else f"auto: {made.q_layout.name}",
        "strategy": made.strategy,
        "plan": made.digest,
        "balance": round(balance(made.mask, made.q_layout), 3),
        "one_rank_ms": round(statistics.median(one) * 1e3, 2),
        "all_ranks_s": round(everyone, 3),
    }


def _seconds(f: Callable[[], Any]) -> float:
    """Of this process alone: planning uses one core, and does not wait for anything."""
    start = time.process_time()
    f()
    return time.process_time() - start
