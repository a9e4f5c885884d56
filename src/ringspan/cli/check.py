"""``ringspan check``: random masks, layouts and strategies against dense attention in float64.

::

    ringspan check --cases 200 --seed 7               each case on 1 to 8 ranks in this process
    ringspan check --cases 200 --seed 7 --world 4     all of them on 4
    ringspan check --world 4 --processes              4 processes over gloo
    ringspan check --seed 7 --only 31                 case 31 again, and nothing else
    ringspan check --model config.json                a model of transformers on 2 processes, against one process

The exit code is 1 if anything failed. With ``--json`` the last line is the summary as JSON; ``worst_error`` in it is
that of the float64 cases, which separates a correct algorithm from a wrong one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from ringspan import __version__
from ringspan.cli import check_model
from ringspan.cli.progress import Progress
from ringspan.errors import InputError
from ringspan.testing.check import CaseResult, run_in_processes, run_in_this_process
from ringspan.testing.fuzz import Case, draw


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=200, help="number of cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same cases (default: %(default)s)")
    parser.add_argument("--world", type=int, help="ranks in every case (default: each case draws 1 to 8)")
    parser.add_argument("--processes", action="store_true", help="one process for each rank, over gloo; needs --world")
    parser.add_argument("--only", type=int, metavar="I", help="run case I of the seed only, and print it as JSON")
    parser.add_argument("--case", metavar="JSON", help="run a case given as JSON, as --only prints it")
    parser.add_argument("--json", action="store_true", help="print the summary as one last line of JSON")
    check_model.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        return check_model.run(args)
    cases = _cases(args)
    if args.only is not None or args.case is not None:
        print(f"{cases[0]}\n{cases[0].to_json()}")
    start = time.monotonic()
    results: list[CaseResult] = []
    with Progress(len(cases)) as bar:
        for result in run_in_processes(cases, args.world) if args.processes else run_in_this_process(cases):
            results.append(result)
            bar.update(len(results), f"{len(results)} of {len(cases)} cases")
            if result.problems:
                print(f"FAILED {result.case}")
                for problem in result.problems:
                    print(f"  {problem}")
                print(f"  again: {_again(result.case, args)}")
    summary = summarise(results, cases)
    print(_in_words(summary, args, time.monotonic() - start))
    if args.json:
        options = {"seed": args.seed, "world": args.world, "processes": args.processes, "seconds": time.monotonic() - start}
        print(json.dumps({**summary, **options, "ringspan": __version__, "torch": torch.__version__}))
    return 1 if summary["failed"] else 0


def summarise(results: Sequence[CaseResult], cases: Sequence[Case]) -> dict[str, Any]:
    """Return the figures of a run. An unfinished case counts as failed."""
    finished = {result.case.index for result in results}
    failures = [result.case.index for result in results if result.problems]
    failures += [case.index for case in cases if case.index not in finished]
    worst: dict[str, float] = {}
    for result in results:
        worst[result.case.dtype] = max(worst.get(result.case.dtype, 0.0), result.worst)
    return {
        "cases": len(cases),
        "worst_error": worst.get("float64", 0.0),
        "failed": len(failures),
        "worst_error_by_dtype": worst,
        "cases_by_dtype": {dtype: sum(r.case.dtype == dtype for r in results) for dtype in worst},
        "failures": failures,
    }


def _cases(args: argparse.Namespace) -> list[Case]:
    for name, least in (("cases", 1), ("seed", 0), ("world", 1), ("only", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise InputError(f"--{name} must be at least {least}, not {value}")
    if args.case is not None:
        cases = [Case.from_json(args.case)]
    else:
        indices = range(args.cases) if args.only is None else [args.only]
        cases = [draw(args.seed, index, args.world) for index in indices]
    if args.processes and args.world is None:
        raise InputError("--processes needs --world, the number of processes")
    if args.processes and cases[0].world != args.world:
        raise InputError(f"this case is for {cases[0].world} ranks: run it with --world {cases[0].world}")
    return cases


def _again(case: Case, args: argparse.Namespace) -> str:
    if args.case is not None:
        return f"ringspan check --case '{args.case}'"
    world = f" --world {args.world}" if args.world is not None else ""
    return f"ringspan check --seed {args.seed} --only {case.index}{world}{' --processes' * args.processes}"


def _in_words(summary: dict[str, Any], args: argparse.Namespace, seconds: float) -> str:
    where = f"{args.world} processes" if args.processes else f"{args.world or '1 to 8'} ranks in one process"
    lines = [f"{summary['cases']} cases on {where} in {seconds:.1f} s: {summary['failed'] or 'none'} failed"]
    for dtype, worst in sorted(summary["worst_error_by_dtype"].items(), reverse=True):
        lines.append(f"  {dtype:9} {summary['cases_by_dtype'][dtype]:>6} cases, worst error {worst:.1e}")
    return "\n".join(lines)
