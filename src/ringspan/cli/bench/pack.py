"""``ringspan bench pack``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import ringspan as rs
from ringspan.bench.packing import FIXED_SIZE, LENGTHS, SHAPE, draw_batch_lengths, packing_rows
from ringspan.bench.rows import OnProgress, Row
from ringspan.cli.argument_types import at_least
from ringspan.cli.batch_picture import draw_batch
from ringspan.cli.plan.png import check_drawable
from ringspan.costs.hardware import hardware

HELP = "how ways of packing share a batch over all ranks: predicted time of the slowest rank ÷ ideal"

DESCRIPTION = f"""{HELP}

A batch has documents of very different lengths. The ways of packing are:

  in order      fixed context parallelism: groups of {FIXED_SIZE} ranks, whose sequences take documents in the order of the
                batch until the next one does not fit
  equal work    the same groups, with sequences of equal predicted time, as of WLB-LLM
  powers of 2   a document gets the smallest power of two of ranks that holds it, and groups of a size get equal sums of
                squared length ÷ ranks, as of Megatron's balanced scheduler
  ringspan      rs.pack: every microbatch over all ranks
  bf16 dkv      the same, with gradients of keys and values sent in bfloat16
"""

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
        sizes = {"longest": args.longest, "rounds": args.rounds, "seed": args.seed}
        drawn = draw_batch_lengths(args.lengths[0], args.world[0], args.tokens_per_rank, **sizes)
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
