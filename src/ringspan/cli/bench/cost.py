"""``ringspan bench cost``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ringspan.bench.cost import STRATEGIES, cost_rows, summary
from ringspan.bench.rows import OnProgress, Row
from ringspan.cli.argument_types import at_least

__all__ = ["COLUMNS", "HELP", "add_arguments", "measure", "summary"]

HELP = "the predictions of the cost model for processes on this machine, against measured times"

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, one = parser.add_argument, at_least(1)
    add("--world", type=one, default=2, metavar="N", help="processes; at most as many as cores (default: %(default)s)")
    add("--seq-len", type=one, default=2048, metavar="N", help="tokens (default: %(default)s)")
    add("--heads", type=one, nargs="+", default=[4], metavar="N", help="query and key heads, one or several (default: 4)")
    add("--head-dim", type=one, default=64, metavar="N", help="default: %(default)s")
    add("--strategies", nargs="+", default=[*STRATEGIES], help=f"default: {' '.join(STRATEGIES)}")
    add("--layout", default="auto", help="default: %(default)s")
    add("--rounds", type=one, default=10, metavar="N", help="rounds; the fastest counts (default: %(default)s)")


def measure(args: argparse.Namespace, on_progress: OnProgress) -> Iterable[Row]:
    return cost_rows(
        world=args.world,
        seq_len=args.seq_len,
        heads=args.heads,
        head_dim=args.head_dim,
        strategies=args.strategies,
        layout=args.layout,
        rounds=args.rounds,
        on_progress=on_progress,
    )
