"""Processes for the experiments, forked from a server that has imported torch already, so that they start quickly."""

from __future__ import annotations

import multiprocessing
import os

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed", "ringspan", "benchmarks.reliability.harness"])


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
