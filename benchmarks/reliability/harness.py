"""Trials of one fault: start ranks, collect what each of them reports, classify the trials.

A trial starts one process for each rank. The processes are forked from a server that has imported torch already, so a
trial takes about a second. The parent hosts the store: it survives the death of any rank.

The columns of a table:

    trials     how many were run
    named      every surviving rank raised an error of ringspan that names the rank at fault, or it is that rank
    unnamed    every surviving rank raised an error of ringspan, but one of them does not name the rank at fault
    silent     a rank returned without an error
    hang       a rank reported nothing within the time limit
    abort      the process of a rank ended without a report, and not by the experiment
    seconds    from the fault to the error of a rank: the median and the largest
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ringspan as rs
from benchmarks.reliability.processes import FORKS


class Report(NamedTuple):
    """How a rank ended."""

    kind: str
    """The name of the exception class; "" if there was none."""
    text: str = ""
    at: float = 0.0
    """Seconds since the epoch."""
    is_ringspan: bool = True


class Trial(NamedTuple):
    """The reports by rank, of ranks that reported, the rank at fault, and the time of the fault."""

    guilty: int
    reports: dict[int, Report]
    exit_codes: dict[int, int]
    """Of ranks that ended without a report, other than by the experiment."""
    missing: tuple[int, ...]
    fault_at: float

    @property
    def outcome(self) -> str:
        if self.missing:
            return "hang"
        if self.exit_codes:
            return "abort"
        if any(not report.kind for report in self.reports.values()):
            return "silent"
        if not all(report.is_ringspan or rank == self.guilty for rank, report in self.reports.items()):
            return "unnamed"
        named = [f"rank {self.guilty}" in report.text or rank == self.guilty for rank, report in self.reports.items()]
        return "named" if all(named) else "unnamed"

    @property
    def seconds(self) -> list[float]:
        return [max(0.0, r.at - self.fault_at) for r in self.reports.values() if self.fault_at]


def report_of(job: Callable[[], Any]) -> Report:
    """Call a function and report its error."""
    try:
        job()
    except Exception as error:
        return Report(type(error).__name__, str(error), time.time(), isinstance(error, rs.RingspanError))
    return Report("", "", time.time())


def run_ranks(
    job: Callable[..., None], world: int, guilty: int, args: Sequence[Any], *, limit: float, stay: bool = True
) -> Trial:
    """Run ``job(rank, guilty, tell, *args)`` on every rank. ``tell(time)`` reports the time of the fault.

    If ``stay``, a rank that has raised keeps its process until all have reported; else it exits at once.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers, pipes = [], {}
    for rank in range(world):
        here, there = FORKS.Pipe()
        worker = FORKS.Process(
            target=_serve, args=(there, job, rank, world, guilty, store.port, stay, tuple(args)), daemon=True
        )
        worker.start()
        there.close()
        workers.append(worker)
        pipes[here] = rank
    reports: dict[int, Report] = {}
    ended: dict[int, int] = {}
    fault_at, deadline = 0.0, time.monotonic() + limit
    while pipes and (remaining := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pipes), timeout=remaining):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                message = pipe.recv()
            except (EOFError, ConnectionError):
                workers[rank].join(timeout=5)
                if rank != guilty:
                    ended[rank] = workers[rank].exitcode or 0
                del pipes[pipe]
                continue
            if isinstance(message, Report):
                reports[rank] = message
                del pipes[pipe]
            else:
                fault_at = message
    missing = tuple(rank for rank in pipes.values() if rank != guilty)
    for worker in workers:
        if worker.pid is not None and worker.is_alive():
            worker.kill()
        worker.join()
    return Trial(guilty, reports, ended, missing, fault_at)


def _serve(
    pipe: Connection, job: Callable[..., None], rank: int, world: int, guilty: int, port: int, stay: bool, args: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    pipe.send(report_of(lambda: job(rank, guilty, pipe.send, *args)))
    if stay:
        signal.pause()  # the parent kills it
    os._exit(0)


OUTCOMES = ("named", "unnamed", "silent", "hang", "abort")


def summarize(name: str, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return a row of a table."""
    counts = {kind: sum(t.outcome == kind for t in trials) for kind in OUTCOMES}
    seconds = [s for t in trials for s in t.seconds] or [0.0]
    times = f"{statistics.median(seconds):.1f} / {max(seconds):.1f}"
    return {"case": name, "trials": len(trials), **counts, "seconds": times}


def summarize_by(name_of: Callable[[Any], str], found: Sequence[tuple[Any, Trial]]) -> list[dict[str, Any]]:
    """Return a row for each name of a case, and one for all. ``found`` has cases and their trials."""
    by_name: dict[str, list[Trial]] = {}
    for case, trial in found:
        by_name.setdefault(name_of(case), []).append(trial)
    rows = [summarize(name, trials) for name, trials in by_name.items()]
    return [*rows, summarize("all", [trial for _, trial in found])]


def log_bad(trial: Trial, what: str) -> None:
    """Print a trial that is not as it should be to stderr."""
    if trial.outcome != "named":
        print(f"{what}: {trial.outcome}, guilty {trial.guilty}, missing {trial.missing}, {trial.exit_codes}", file=sys.stderr)
        for rank, report in sorted(trial.reports.items()):
            print(f"    rank {rank}: {report.kind}: {report.text[:300]}", file=sys.stderr)
