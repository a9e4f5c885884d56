"""``ringspan bench``: measure this machine. Prints a table, or with ``--json`` a line for each measurement."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable
from typing import Any, Protocol

import torch

import ringspan as rs
from ringspan.bench.rows import OnProgress, Row
from ringspan.cli.bench import calibrate, cost, cpu, layouts, pack, planning, rank
from ringspan.cli.console import show, table
from ringspan.cli.progress import Progress


class Benchmark(Protocol):
    """A module that runs a function of ``ringspan.bench``. It may also have a DESCRIPTION, and a ``summary(rows) ->
    str``."""

    HELP: str
    COLUMNS: dict[str, str]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def measure(self, args: argparse.Namespace, on_progress: OnProgress) -> Iterable[Row]: ...


BENCHMARKS: dict[str, Any] = {
    "cpu": cpu,
    "plan": planning,
    "rank": rank,
    "layouts": layouts,
    "pack": pack,
    "calibrate": calibrate,
    "cost": cost,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="benchmark", metavar="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        sub = names.add_parser(
            name,
            help=benchmark.HELP,
            description=getattr(benchmark, "DESCRIPTION", benchmark.HELP),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        benchmark.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print a line of JSON for each measurement instead of the table")


def run(args: argparse.Namespace) -> int:
    benchmark: Benchmark = BENCHMARKS[args.benchmark]
    rows: list[Row] = []
    try:
        with Progress() as bar:
            for row in benchmark.measure(args, bar.on_progress):
                versions = {"ringspan": rs.__version__, "torch": torch.__version__, "machine": platform.machine()}
                if args.json:
                    bar.print(json.dumps({**versions, **row}))  # at once: the next one may take long, or fail
                rows.append(row)
    finally:  # of what was measured, also if a later measurement fails or is interrupted
        if rows and not args.json:
            show(table(benchmark.COLUMNS, rows))
    if not args.json and hasattr(benchmark, "summary"):
        show(benchmark.summary(rows))
    return 0
