"""Run experiments: independent tasks, several at a time, until all are done or the time is over; then their tables.

An experiment is a list of tasks and a function that turns their results into the rows of a table. A task is called with
the time at which it must stop (of ``time.monotonic``, which is the same clock in all processes of a machine) and
returns a list of results. Tasks run in threads and start processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.reliability.processes import FORKS

Task: TypeAlias = Callable[[float], Sequence[Any]]
Rows: TypeAlias = list[dict[str, Any]]

PROGRESS_SECONDS = 10.0
FOR_EVER = 10.0**9


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The tasks of an experiment, and how their results become a table.

    ``goal`` is the number of trials if every task is done, and ``count`` that of the trials in some results.
    ``is_long``: its tasks cannot be divided, so they are started first. ``skipped`` says why it cannot run on this
    machine.
    """

    name: str
    tasks: Sequence[Task]
    rows: Callable[[list[Any]], Rows]
    goal: int
    count: Callable[[list[Any]], int] = len
    is_long: bool = False
    skipped: str = ""


@dataclass
class Progress:
    """What is done of an experiment."""

    results: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    tasks: int = 0
    seconds: float = 0.0


def run_experiments(
    experiments: Sequence[Experiment],
    *,
    jobs: int,
    seconds: float = FOR_EVER,
    on_progress: Callable[[dict[str, Progress]], object] | None = None,
) -> dict[str, Progress]:
    """Run all tasks, ``jobs`` at a time, and print the progress to stderr. No task is started after ``seconds``.

    ``on_progress`` is called every few seconds with a copy of what is done.
    """
    start = time.monotonic()
    found = {e.name: Progress() for e in experiments}
    lock, done = threading.Lock(), threading.Event()

    def run(experiment: Experiment, task: Task) -> None:
        results, error = [], ""
        if time.monotonic() < start + seconds:
            try:
                results = list(task(start + seconds))
            except Exception:
                error = traceback.format_exc()
                print(f"{experiment.name}: {error}", file=sys.stderr, flush=True)
        with lock:
            progress = found[experiment.name]
            progress.results += results
            progress.errors += [error] if error else []
            progress.tasks += 1
            progress.seconds = time.monotonic() - start

    def report() -> None:
        while not done.wait(PROGRESS_SECONDS):
            parts = [f"{e.name} {found[e.name].tasks}/{len(e.tasks)}" for e in experiments if e.tasks]
            print(f"{time.monotonic() - start:.0f} s: tasks of {', '.join(parts)}", file=sys.stderr, flush=True)
            if on_progress:
                with lock:
                    copy = {name: replace(progress, results=list(progress.results)) for name, progress in found.items()}
                on_progress(copy)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    with ThreadPoolExecutor(jobs) as threads:
        for running in [threads.submit(run, experiment, task) for experiment, task in in_order(experiments)]:
            running.result()
    done.set()
    reporter.join()
    return found


def in_order(experiments: Sequence[Experiment]) -> list[tuple[Experiment, Task]]:
    """Order the tasks: long ones first, then those of all experiments in turn, so that all end together."""
    ordered = []
    for experiment in experiments:
        for n, task in enumerate(experiment.tasks):
            ordered.append((-1.0 if experiment.is_long else (n + 0.5) / len(experiment.tasks), experiment, task))
    return [(experiment, task) for _, experiment, task in sorted(ordered, key=lambda entry: entry[0])]


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function that runs in a process of its own."""
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=_call, args=(there, function, args), daemon=True)
    process.start()
    there.close()
    try:
        error, result = here.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a process of {function.__name__} ended with exit code {process.exitcode}") from None
    process.join()
    if error:
        raise RuntimeError(error)
    return result


def _call(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(("", function(*args)))
    except Exception:
        pipe.send((traceback.format_exc(), None))
    os._exit(0)


def table(rows: Rows) -> str:
    """Return rows as a Markdown table. The first column has the name of the row."""
    header = list(rows[0]) if rows else []
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[f"{x:,}" if isinstance(x, int) else str(x) for x in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(experiments: Sequence[Experiment], found: dict[str, Progress]) -> tuple[str, dict[str, Any]]:
    """Return the tables of all experiments as Markdown, and their rows for JSON."""
    parts, rows_by_name = [], {}
    for experiment in experiments:
        progress = found[experiment.name]
        rows = experiment.rows(progress.results) if progress.results else []
        goal, done = experiment.goal, experiment.count(progress.results)
        title = f"{experiment.name}: {done:,} of {goal:,} in {progress.seconds:.0f} s"
        notes = [f"Not run: {experiment.skipped}."] if experiment.skipped else []
        notes += [f"{len(progress.errors)} tasks failed: {progress.errors[0].splitlines()[-1]}"] if progress.errors else []
        parts.append("\n\n".join([f"### {title}", *notes, *([table(rows)] if rows else [])]))
        rows_by_name[experiment.name] = {
            "goal": goal,
            "done": done,
            "skipped": experiment.skipped,
            "errors": progress.errors,
            "rows": rows,
        }
    return "\n\n".join(parts), rows_by_name


def parser_of(text: str | None, trials: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of every experiment."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n\n")[0])
    if trials is not None:
        parser.add_argument("--trials", type=int, default=trials, help=f"how many (default {trials:,})")
    add_common_options(parser, jobs=2)
    return parser


def add_common_options(parser: argparse.ArgumentParser, *, jobs: int) -> None:
    parser.add_argument("--jobs", type=int, default=jobs, help="tasks that run at the same time (default %(default)s)")
    parser.add_argument("--budget", type=float, default=FOR_EVER, metavar="SECONDS", help="start no trial after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file, too")


def main_of(experiments: Sequence[Experiment], args: argparse.Namespace, title: str = "") -> None:
    """Run experiments with the options of the command line and print their tables. Exits with 1 if a task failed.

    The files are written again every few seconds, so that a run that is killed leaves what it has measured.
    """

    def write(found: dict[str, Progress]) -> str:
        text, rows = report(experiments, found)
        text = f"{title}\n\n{text}" if title else text
        if getattr(args, "markdown", None):
            args.markdown.write_text(text + "\n", encoding="utf-8")
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        return text

    found = run_experiments(experiments, jobs=args.jobs, seconds=args.budget, on_progress=write)
    print(write(found))
    if any(progress.errors for progress in found.values()):
        raise SystemExit(1)
