"""Memory, threads and descriptors over many new masks, and over many process groups.

    python -m benchmarks.reliability.leaks [--trials N] [--cycles N] [--jobs N]

``--trials`` new masks of 40 random documents are planned and attended to, forward and backward, by two ranks in one
process, with four strategies in turn. Two processes make a process group, attend and destroy it, ``--cycles`` times.
The growth is from the end of the warm-up, which is a fifth of all, to the end.
"""

from __future__ import annotations

import os
import random
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ringspan as rs
from benchmarks.reliability.experiments import Experiment, Rows, in_process, main_of, parser_of
from benchmarks.reliability.processes import FORKS, resident_mib

STRATEGIES = ("auto", "ring", "gather", "exchange")


class Resources(NamedTuple):
    """What a process holds."""

    mib: float
    threads: int
    descriptors: int


def resources() -> Resources:
    tasks = len(os.listdir("/proc/self/task"))
    return Resources(resident_mib(), max(tasks, threading.active_count()), len(os.listdir("/proc/self/fd")))


class Growth(NamedTuple):
    """The number of masks or groups, and the resources after the warm-up and at the end."""

    what: str
    count: int
    warm: Resources
    end: Resources


def new_masks(trials: int, deadline: float) -> list[Growth]:
    """Attend under new masks, in this process."""
    rng, world, warm, count = random.Random(0), rs.LocalWorld(2), resources(), 0
    while count < trials and time.monotonic() < deadline:
        if count == trials // 5:
            warm = resources()
        lengths = [rng.randint(1, 12) for _ in range(40)]
        q = torch.randn(1, 1, sum(lengths), 8, requires_grad=True)
        strategy = STRATEGIES[count % len(STRATEGIES)]
        world.attention(q, q, q, mask=rs.documents(lengths), strategy=strategy).sum().backward()
        count += 1
    return [Growth("masks of 40 documents", count, warm, resources())]


def cycle(rank: int, port: int, cycles: int, deadline: float, tell: Any) -> None:
    """Make and destroy process groups. A job for two processes; the first one decides when the time is over."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit, warm, count = timedelta(seconds=60), resources(), 0
    base = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    for n in range(cycles):
        if rank == 0:
            base.set(f"cycle {n}", "go" if time.monotonic() < deadline else "end")
        if base.get(f"cycle {n}") == b"end":
            break
        if n == cycles // 5:
            warm = resources()
        dist.init_process_group("gloo", store=dist.PrefixStore(str(n), base), rank=rank, world_size=2, timeout=limit)
        cp = rs.ContextParallel(None, rs.causal(64), strategy="ring")
        q = cp.shard(torch.randn(1, 1, 64, 8), dim=2).requires_grad_()
        cp.mean(cp.attention(q, q, q)).backward()
        del cp
        dist.destroy_process_group()
        count += 1
    tell.send(Growth("cycles of init and destroy", count, warm, resources()))


def new_groups(cycles: int, deadline: float) -> list[Growth]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [FORKS.Pipe() for _ in range(2)]
    workers = [FORKS.Process(target=cycle, args=(r, store.port, cycles, deadline, pipes[r][1]), daemon=True) for r in range(2)]
    for worker, (_, there) in zip(workers, pipes, strict=True):
        worker.start()
        there.close()
    results = [here.recv() for here, _ in pipes]
    for worker in workers:
        worker.join()
    assert all(worker.exitcode == 0 for worker in workers), [worker.exitcode for worker in workers]
    return results[:1]


def rows_of(found: list[Growth]) -> Rows:
    return [
        {
            "case": f"{count:,} {what}",
            "MiB after warm-up": round(warm.mib),
            "MiB at the end": round(end.mib),
            "growth": f"{end.mib - warm.mib:+.1f}",
            "threads": f"{warm.threads} → {end.threads}",
            "descriptors": f"{warm.descriptors} → {end.descriptors}",
        }
        for what, count, warm, end in found
    ]


def experiment(masks: int, cycles: int) -> Experiment:
    tasks = [partial(in_process, new_masks, masks)] if masks else []
    tasks += [partial(new_groups, cycles)] if cycles else []
    return Experiment(name="leaks", tasks=tasks, rows=rows_of, goal=len(tasks), is_long=True)


def main() -> None:
    parser = parser_of(__doc__, 10_000)
    parser.add_argument("--cycles", type=int, default=1_000)
    args = parser.parse_args()
    main_of([experiment(args.trials, args.cycles)], args)


if __name__ == "__main__":
    main()
