"""``ringspan bench cpu``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ringspan.bench.cpu import cpu_rows
from ringspan.bench.rows import OnProgress, Row
from ringspan.cli.argument_types import at_least

HELP = "causal attention split over processes against one process, one thread each, forward and backward"

DESCRIPTION = f"""\
{HELP[0].upper() + HELP[1:]}.
It takes about a minute on two cores that nothing else uses. The time grows with the square of --seq-len."""

COLUMNS = {
    "strategy": "strategy",
    "one_s": "one process, s",
    "many_s": "split, s",
    "speedup": "speed-up",
    "spread": "spread",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, one = parser.add_argument, at_least(1)
    add("--world", type=one, default=2, metavar="N", help="processes; at most as many as cores (default: %(default)s)")
    add("--seq-len", type=one, default=8192, metavar="N", help="tokens (default: %(default)s)")
    add("--heads", type=one, default=8, metavar="N", help="query and key heads (default: %(default)s)")
    add("--head-dim", type=one, default=64, metavar="N", help="default: %(default)s")
    add("--rounds", type=one, default=3, metavar="N", help="rounds, each of which measures both sides (default: %(default)s)")
    add("--strategies", nargs="+", default=["ring", "gather", "exchange"], help="default: ring gather exchange")


def measure(args: argparse.Namespace, on_progress: OnProgress) -> Iterable[Row]:
    return cpu_rows(
        world=args.world,
        seq_len=args.seq_len,
        heads=args.heads,
        head_dim=args.head_dim,
        strategies=args.strategies,
        rounds=args.rounds,
        on_progress=on_progress,
    )
