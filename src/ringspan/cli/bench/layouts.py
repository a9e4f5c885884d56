"""``ringspan bench layouts``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ringspan.bench.layouts import COMPARED, LENGTHS, layout_rows
from ringspan.bench.rows import OnProgress, Row
from ringspan.cli.argument_types import at_least

HELP = "how layouts share packed documents: balance, pieces, received key rows"

COLUMNS = {
    "lengths": "lengths",
    "tokens": "tokens",
    "documents": "documents",
    "world": "ranks",
    "layout": "layout",
    "balance": "balance",
    "rows": "rows",
    "over_fewest": "× fewest",
    "between_nodes": "between nodes",
    "pieces": "pieces",
    "most_pieces": "most",
    "make_ms": "make, ms",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, one = parser.add_argument, at_least(1)
    add("--lengths", nargs="+", default=[*LENGTHS], choices=[*LENGTHS], help="distributions of lengths (default: all)")
    add("--documents", type=one, default=None, metavar="N", help="documents (default: one for every 1024 tokens)")
    add("--seq-len", type=one, nargs="+", default=[131072, 1048576], metavar="N", help="tokens (default: 131072 1048576)")
    add("--world", type=one, nargs="+", default=[8, 32, 128], metavar="N", help="ranks (default: 8 32 128)")
    add("--layouts", nargs="+", default=[*COMPARED], choices=[*COMPARED], help="default: all")
    add(
        "--per-node",
        type=one,
        default=None,
        metavar="N",
        help="count the key rows that cross between nodes of N ranks, and compare balanced(per_node=N), too",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the lengths (default: %(default)s)")


def measure(args: argparse.Namespace, on_progress: OnProgress) -> Iterable[Row]:
    return layout_rows(
        seq_len=args.seq_len,
        lengths=args.lengths,
        documents=args.documents,
        world=args.world,
        layouts=args.layouts,
        seed=args.seed,
        per_node=args.per_node,
    )
