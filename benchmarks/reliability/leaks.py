"""Memory, threads and descriptors over many new masks, and over many process groups.

    python -m benchmarks.reliability.leaks [--trials N] [--cycles N] [--json]

``--trials`` new masks of 40 random documents are planned and attended to, forward and backward, by two ranks in one
process. Two processes make a process group, attend and destroy it, ``--cycles`` times. The growth is from the end of
the warm-up, which is a fifth of all, to the end.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from benchmarks.reliability.harness import FORKS, parser_of, print_table, resident_mib


def new_masks(trials: int) -> list[str]:
    torch.set_num_threads(1)
    rng, world, warm = random.Random(0), rs.LocalWorld(2), 0.0
    for n in range(trials):
        if n == trials // 5:
            warm = resident_mib()
        lengths = [rng.randint(1, 12) for _ in range(40)]
        q = torch.randn(1, 1, sum(lengths), 8, requires_grad=True)
        world.attention(q, q, q, mask=rs.documents(lengths)).sum().backward()
    return row(f"{trials:,} masks of 40 documents", warm, resident_mib(), "", "")


def cycle(rank: int, port: int, cycles: int, tell: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit, warm = timedelta(seconds=60), (0.0, 0, 0)
    base = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    for n in range(cycles):
        if n == cycles // 5:
            warm = resources()
        dist.init_process_group("gloo", store=dist.PrefixStore(str(n), base), rank=rank, world_size=2, timeout=limit)
        cp = rs.ContextParallel(None, rs.causal(64), strategy="ring")
        q = cp.shard(torch.randn(1, 1, 64, 8), dim=2).requires_grad_()
        cp.mean(cp.attention(q, q, q)).backward()
        del cp
        dist.destroy_process_group()
    tell.send((warm, resources()))


def resources() -> tuple[float, int, int]:
    tasks = len(os.listdir("/proc/self/task"))
    return resident_mib(), max(tasks, threading.active_count()), len(os.listdir("/proc/self/fd"))


def groups(cycles: int) -> list[str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [FORKS.Pipe() for _ in range(2)]
    workers = [FORKS.Process(target=cycle, args=(rank, store.port, cycles, pipes[rank][1])) for rank in range(2)]
    for worker in workers:
        worker.start()
    results = [here.recv() for here, _ in pipes]
    for worker in workers:
        worker.join()
    assert all(worker.exitcode == 0 for worker in workers), [worker.exitcode for worker in workers]
    (warm, warm_threads, warm_files), (end, threads, files) = results[0]
    name = f"{cycles:,} cycles of init and destroy"
    return row(name, warm, end, f"{warm_threads} → {threads}", f"{warm_files} → {files}")


def row(name: str, warm: float, end: float, threads: str, files: str) -> list[str]:
    return [name, f"{warm:.0f}", f"{end:.0f}", f"{end - warm:+.1f}", threads, files]


def main() -> None:
    parser = parser_of(__doc__, 10_000)
    parser.add_argument("--cycles", type=int, default=1_000)
    args = parser.parse_args()
    experiments: list[tuple[Callable[[int], list[str]], int]] = [(groups, args.cycles), (new_masks, args.trials)]
    lines = [experiment(count) for experiment, count in experiments if count]
    header = ["", "MiB after warm-up", "MiB at the end", "growth", "threads", "descriptors"]
    print_table(header, lines, as_json=args.json)


if __name__ == "__main__":
    main()
