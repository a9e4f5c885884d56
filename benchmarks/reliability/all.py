"""All experiments on reliability, several trials at a time, with one report.

    python -m benchmarks.reliability.all --jobs 12 --full --budget 420 --json all.json --markdown all.md

Without ``--full`` the counts are a hundredth, which takes a few minutes on two cores. When the budget is spent, no
further trial is started, and the tables say how many were run. The trials are each other's load.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import torch

from benchmarks.reliability import exits, kills, leaks, link_down, mismatches, mutations, numerics, restart, soak
from benchmarks.reliability.experiments import Experiment, add_common_options, main_of

COUNTS = {
    "masks": 10_000,
    "cycles": 1_000,
    "soak": 20_000,
    "mismatches": 1_218,
    "kills": 200,
    "stops": 50,
    "exits": 200,
    "mutations": 100_000,
    "restarts": 6,
}


def experiments(jobs: int, divisor: int, names: list[str]) -> list[Experiment]:
    """Return the experiments of these names, with counts that are divided. No names: all but numerics."""
    n = {name: max(1, count // divisor) for name, count in COUNTS.items()}
    everything = {
        "leaks": lambda: leaks.experiment(n["masks"], n["cycles"]),
        "soak": lambda: soak.experiment(n["soak"], pools=max(1, jobs // 4)),
        "mismatches": lambda: mismatches.experiment(n["mismatches"], jobs=jobs),
        "kills": lambda: kills.experiment(n["kills"]),
        "stops": lambda: kills.experiment(n["stops"], stop=True),
        "exits": lambda: exits.experiment(n["exits"], fresh=max(1, n["exits"] // 50)),
        "mutations": lambda: mutations.experiment(n["mutations"]),
        "restarts": lambda: restart.experiment(n["restarts"]),
        "link down": lambda: link_down.experiment(1),
    }
    found = [make() for name, make in everything.items() if name in (names or everything)]
    if "numerics" in names:  # a fault of the machine does not change them
        found += numerics.experiments() if divisor == 1 else numerics.experiments(worlds=(1, 4), dtypes=("bfloat16",))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--full", action="store_true", help="the full counts")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these experiments")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    add_common_options(parser, jobs=max(1, (os.cpu_count() or 1) * 3 // 4))
    args = parser.parse_args()
    chosen = experiments(args.jobs, 1 if args.full else 100, args.only)
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {args.jobs} jobs"
    main_of(chosen, args, title=f"Measured with {machine}.")


if __name__ == "__main__":
    main()
