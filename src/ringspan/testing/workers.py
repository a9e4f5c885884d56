"""A pool of worker processes on this machine, in one process group. The demo, the checks, the benchmarks and the tests
use it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ringspan.errors import RingspanError

# How long the other workers may run on after one has failed, before they are terminated.
GRACE_SECONDS = 10.0


class WorkerFailed(RingspanError, RuntimeError):
    """A worker raised, or its process ended. The message has its traceback."""


class Pool:
    """``world`` processes in one process group, started once and used for any number of jobs. With ``backend="nccl"``
    they take the GPUs of this machine in turn.

    ``preload`` is a module that all workers need: it is imported once, in a process that the workers are forked from.

    A job is a function defined at module level. Every worker calls it as ``job(rank, *args)`` with
    ``torch.distributed`` initialised. The results come back in the order of the ranks.
    """

    def __init__(
        self, world: int, *, backend: str = "gloo", threads: int = 1, timeout: float = 300.0, preload: str | None = None
    ) -> None:
        self.world, self.timeout = world, timeout
        context: Any = multiprocessing.get_context("spawn" if preload is None else "forkserver")
        if preload is not None:
            context.set_forkserver_preload([preload])
        # This process hosts the store, on a port that the operating system chooses: one chosen here could be taken
        # meanwhile.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port = self._store.port
        self._workers: list[tuple[Any, Connection]] = []
        with _ignore_interrupts():
            for rank in range(world):
                here, there = context.Pipe()
                worker = context.Process(target=_serve, args=(there, rank, world, port, backend, threads, timeout), daemon=True)
                worker.start()
                there.close()
                self._workers.append((worker, here))

    def run(self, job: Callable[..., Any], *args: Any, on_message: Callable[[int, Any], None] | None = None) -> list[Any]:
        """Run the job on all workers. ``on_message(rank, message)`` is called for each :func:`send_message` of a
        job."""
        if not self._workers:
            raise WorkerFailed("this pool is closed: a job failed, or the `with` block has ended")
        for _, pipe in self._workers:
            pipe.send((job, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        deadline = time.monotonic() + self.timeout
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in pipes.values():
                    failures.setdefault(
                        rank, "did not finish in time" if not failures else "was terminated after another failed"
                    )
                break
            for pipe in [pipe for pipe in pipes if pipe in ready]:
                rank = pipes[pipe]
                kind, payload = self._receive(pipe, rank)
                if kind == "message":
                    if on_message:
                        on_message(rank, payload)
                    continue
                del pipes[pipe]
                if kind == "result":
                    results[rank] = payload
                else:
                    failures[rank] = payload
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            self.close()
            raise WorkerFailed("\n".join(f"worker {rank}: {text.rstrip()}" for rank, text in failures.items()))
        return [results[rank] for rank in range(self.world)]

    def _receive(self, pipe: Connection, rank: int) -> tuple[str, Any]:
        try:
            kind, payload = pipe.recv()
            return kind, payload
        except (EOFError, ConnectionError):
            worker = self._workers[rank][0]
            worker.join(timeout=1)
            return "failure", f"ended (exit code {worker.exitcode})"

    @property
    def is_closed(self) -> bool:
        return not self._workers

    def close(self) -> None:
        for worker, pipe in self._workers:
            pipe.close()
            worker.terminate()
        for worker, _ in self._workers:
            worker.join(timeout=5)
            if worker.is_alive():
                worker.kill()
        self._workers = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Let processes that are started in the block ignore ctrl-C. The parent handles it and terminates them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# In a worker: the pipe to the pool. Empty in every other process.
_parent: list[Connection] = []


def send_message(message: Any) -> None:
    """Send a message from a job to ``on_message`` of the pool."""
    for pipe in _parent:
        pipe.send(("message", message))


def _serve(pipe: Connection, rank: int, world: int, port: int, backend: str, threads: int, timeout: float) -> None:
    _parent.append(pipe)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        if backend == "nccl":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except Exception:
        pipe.send(("failure", traceback.format_exc()))
        raise SystemExit(1) from None
    while True:
        try:
            job, args = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            pipe.send(("result", job(rank, *args)))
        except BaseException:
            pipe.send(("failure", traceback.format_exc()))
    # Without destroy_process_group: it could wait for peers whose processes have ended.
    sys.stdout.flush()
    os._exit(0)
