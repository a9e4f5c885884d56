"""The time of planning with empty caches, in seconds of one core."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import ringspan as rs
from ringspan.bench.rows import Row
from ringspan.layouts import balance

AUTO = ("auto", "auto")
# The plan of a new batch in training: 131,072 tokens on a node of 8 ranks, layout and strategy to be chosen.
BATCH_TOKENS, BATCH_RANKS, BATCH_DOCUMENTS = 131072, 8, (28, 200)
NODE = 8  # ranks
BATCH_ROWS = [[700, 32_068], [32_768], [16_384] * 2, [8_192] * 4]
ROUNDS = 8


def planning_rows(*, documents: int, seq_len: int, world: int, seed: int) -> Iterator[Row]:
    """Yield a row for each mask of a batch with ``"auto"``, and for one with a given layout and strategy. Then a row
    for each of some layouts and strategies of a large mask, for one on twice as many ranks, and for the packing of a
    batch."""
    rs.plan(rs.documents([3, 5]), world=2)  # imports and first uses are not part of the first row
    n = BATCH_TOKENS
    packed = [_lengths(n, count, seed) for count in BATCH_DOCUMENTS]
    batches: list[Callable[[], rs.Mask]] = [
        lambda: rs.causal(n),
        lambda: rs.causal(n) & rs.window(left=4096),
        lambda: rs.documents(BATCH_ROWS),
        *(lambda lengths=lengths: rs.documents(lengths) for lengths in packed),
    ]
    large = _lengths(seq_len, documents, seed)
    ways = (AUTO, ("zigzag", "exchange"), ("zigzag", "ring"), ("round_robin", "exchange"), ("contiguous", "gather"))
    yield from (_row(mask, BATCH_RANKS, *AUTO) for mask in batches)
    yield _row(batches[-1], BATCH_RANKS, "balanced", "exchange")
    yield from (_row(lambda: rs.documents(large), world, *way) for way in ways)
    yield _row(lambda: rs.documents(large), 2 * world, f"balanced(per_node={NODE})", "exchange")
    yield _pack_row(large, world, -(-seq_len // world))


def _pack_row(lengths: list[int], world: int, tokens_per_rank: int) -> Row:
    """Measure ``rs.pack``, which includes the plan of one rank for each microbatch."""

    def pack() -> rs.Microbatch:
        rs.clear_caches()
        return rs.pack(lengths, world, tokens_per_rank=tokens_per_rank, hardware=f"h200x{NODE}")[0]

    taken = statistics.median(_seconds(pack) for _ in range(ROUNDS))
    part = pack()
    return {
        "bench": "plan",
        "mask": f"pack of {len(lengths)} documents",
        "world": world,
        "layout": part.layout.name,
        "strategy": part.plan.strategy,
        "plan": part.plan.digest,
        "balance": round(balance(part.mask, part.layout), 3),
        "one_rank_ms": round(taken * 1e3, 2),
        "all_ranks_s": None,
    }


def _lengths(tokens: int, documents: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, tokens), documents - 1, replace=False))
    lengths: list[int] = np.diff(np.concatenate([[0], cuts, [tokens]])).tolist()
    return lengths


def _row(mask: Callable[[], rs.Mask], world: int, layout: str, strategy: str) -> Row:
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
    """Return the processor time of this process: planning uses one core and waits for nothing.

    A full garbage collection of this process takes 80 ms and would be part of a random row, so it takes place before.
    """
    gc.collect()
    start = time.process_time()
    f()
    return time.process_time() - start
