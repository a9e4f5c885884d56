"""``ringspan bench pack``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import ringspan as rs
from ringspan.bench.packing import FILLED, LENGTHS, SHAPE, draw_lengths, packing_rows
from ringspan.bench.rows import OnProgress, Row
from ringspan.cli.argument_types import at_least
from ringspan.cli.batch_picture import draw_batch
from ringspan.cli.plan.png import check_drawable
from ringspan.costs.hardware import hardware

HELP = "how ways of packing share a batch over all ranks: predicted time of the slowest rank ÷ ideal"

COLUMNS = {
    "lengths": "lengths",
    "documents": "documents",
    "tokens": "tokens",
    "world": "ranks",
    "way": "way of packing",
    "rounds": "rounds",
    "slowest_ms": "slowest, ms a layer",
    "computing_over_ideal": "computing ÷ ideal",
    "over_ideal": "÷ ideal",
    "bound_over_ideal": "bound ÷ ideal",
    "make_s": "planning, s a round",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, one = parser.add_argument, at_least(1)
    add("--lengths", nargs="+", default=[*LENGTHS], choices=[*LENGTHS], help="distributions of lengths (default: all)")
    add("--world", type=one, nargs="+", default=[64], metavar="N", help="ranks (default: 64)")
    add("--tokens-per-rank", type=one, default=16384, metavar="N", help="tokens on a rank at a time (default: %(default)s)")
    add("--longest", type=one, default=262144, metavar="N", help="longest document (default: %(default)s)")
    add("--rounds", type=one, default=2, metavar="N", help="tokens of the batch, in rounds of all ranks (default: %(default)s)")
    add("--hardware", default="h200x8", metavar="NAME", help="the machine (default: %(default)s)")
    add("--png", type=Path, metavar="FILE", help="also draw the first microbatch of the first batch (needs matplotlib)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the lengths (default: %(default)s)")


def measure(args: argparse.Namespace, on_progress: OnProgress) -> Iterable[Row]:
    if args.png is not None:
        check_drawable(args.png)
        machine = hardware(args.hardware)
        tokens = int(args.world[0] * args.tokens_per_rank * args.rounds * FILLED)
        drawn = draw_lengths(
            args.lengths[0], tokens=tokens, longest=min(args.longest, args.world[0] * args.tokens_per_rank), seed=args.seed
        )
        part, *_ = rs.pack(drawn, args.world[0], tokens_per_rank=args.tokens_per_rank, hardware=machine, shape=SHAPE)
        draw_batch(args.png, part, machine, SHAPE)
    return packing_rows(
        lengths=args.lengths,
        world=args.world,
        tokens_per_rank=args.tokens_per_rank,
        longest=args.longest,
        rounds=args.rounds,
        machine=args.hardware,
        seed=args.seed,
        on_progress=on_progress,
    )
