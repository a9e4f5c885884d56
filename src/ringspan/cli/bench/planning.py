"""``ringspan bench plan``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ringspan.bench.planning import planning_rows
from ringspan.bench.rows import OnProgress, Row
from ringspan.cli.argument_types import at_least

HELP = "how long planning takes: the masks of a batch on 8 ranks, and a large mask on 64"

COLUMNS = {
    "mask": "mask",
    "world": "ranks",
    "layout": "layout",
    "strategy": "strategy",
    "balance": "balance",
    "one_rank_ms": "one rank, ms",
    "all_ranks_s": "all ranks, s",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, one = parser.add_argument, at_least(1)
    add("--documents", type=one, default=1000, metavar="N", help="documents of the large mask (default: %(default)s)")
    add("--seq-len", type=one, default=1048576, metavar="N", help="tokens of the large mask (default: %(default)s)")
    add("--world", type=one, default=64, metavar="N", help="ranks for the large mask (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the documents' lengths (default: %(default)s)")


def measure(args: argparse.Namespace, on_progress: OnProgress) -> Iterable[Row]:
    return planning_rows(documents=args.documents, seq_len=args.seq_len, world=args.world, seed=args.seed)
