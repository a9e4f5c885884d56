"""Measurements that :class:`~ringspan.costs.Hardware` is fitted to: kernels, copies and, with several processes,
messages and overlap.

A *round* times everything on all ranks at the same time, as in real work: processes on one machine share its caches and
its memory. For each quantity the shortest time of all rounds counts: other processes can only make it longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import ringspan as rs
from ringspan.bench.fit import (
    FittedCopies,
    FittedKernel,
    Message,
    TimedAttention,
    fit_copies,
    fit_kernel,
    fit_link,
    fit_overlap,
)
from ringspan.bench.graphs import captured
from ringspan.costs import Hardware
from ringspan.engine import attend_ranks, config_for
from ringspan.frontends.validate import check_scale
from ringspan.plans.data import PHASES
from ringspan.transports.null import NullTransport

Seconds = NDArray[np.float64]

# Message sizes in bytes: small ones for the latency, large ones for the bandwidth.
MESSAGES = (1 << 10, 1 << 20, 1 << 22, 1 << 24)
# Bytes of each copy in time_copy, and how often it is repeated in one measurement: small ones for the launch, large
# ones for the bandwidth. On a GPU the large ones are larger than its cache.
COPIES = {"cpu": ((1 << 13, 64), (1 << 21, 1)), "cuda": ((1 << 13, 64), (1 << 27, 1))}
GRAPH_REPLAYS = 10
MIN_SECONDS = 1e-6  # noise can make the difference of two timings smaller or negative
# CPU time of the thread, so that other processes on a loaded machine do not count. A worker computes in one thread.
CLOCK = time.thread_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """The kernel calls to time: each kind of band in several sizes, for tensors of this shape.

    The two smallest sizes, where rows take the largest part of the time, also have rectangles of as many pairs and
    other numbers of rows.
    """

    shape: rs.Shape
    tokens: tuple[int, ...]
    device: str = "cpu"
    backend: str = "auto"

    @property
    def masks(self) -> list[rs.Mask]:
        """Masks of one band each: full, causal, sliding windows of two widths, and rectangles of other proportions."""
        windows = [rs.causal(n) & rs.window(left=n // part) for n in self.tokens for part in (4, 8)]
        oblong = [
            rs.full(*sides) for n in sorted(self.tokens)[:2] for sides in ((4 * n, max(1, n // 4)), (max(1, n // 4), 4 * n))
        ]
        return [*map(rs.full, self.tokens), *map(rs.causal, self.tokens), *windows, *oblong]


class Round(NamedTuple):
    """Seconds, with ranks first.

    ``attention`` has each mask and phase, ``copying`` one copy of each size, ``messages`` each size, and ``overlap``
    compute alone, a message alone and both at once.
    """

    attention: Seconds
    copying: Seconds
    messages: Seconds
    overlap: Seconds


def time_round(rank: int, probes: Probes) -> tuple[list[tuple[float, float]], list[float], list[float], list[float]]:
    """Run one round. A job for all workers. On one GPU it is called directly, and there are no messages to time."""
    has_peers = dist.is_initialized() and dist.get_world_size() > 1
    return (
        [time_attention(probes, mask) for mask in probes.masks],
        [time_copy(probes, *copied) for copied in COPIES[probes.device]],
        [time_message(size) for size in MESSAGES] if has_peers else [],
        time_both(probes, MESSAGES[-1]) if has_peers else [],
    )


def time_attention(probes: Probes, mask: rs.Mask) -> tuple[float, float]:
    """Time forward and backward of the engine, including its own work around the kernel."""
    forward, backward = _forward_and_backward(probes, mask)
    backward(forward())  # warm-up: allocates memory and may compile
    if probes.device == "cuda":  # one graph holds forward, another forward and backward
        forward_s, both = (time_on_device(f) for f in (forward, lambda: backward(forward())))
        return forward_s, max(both - forward_s, MIN_SECONDS)
    seconds, out = time_after_barrier(forward, CLOCK)
    return seconds, time_after_barrier(lambda: backward(out), CLOCK)[0]


def time_copy(probes: Probes, size: int, repeats: int) -> float:
    """Time a copy of so many bytes, half of the heads of every row, into a message or out of it, as packing and
    unpacking do."""
    rows, there = (torch.randn(size // (4 * 64 * 4), 1, 8, 64, device=probes.device) for _ in range(2))
    every = torch.arange(len(rows), device=probes.device)

    def copy() -> None:
        for _ in range(repeats):  # in one CUDA graph, whose launch takes longer than a small copy
            there[:, :, 4:].index_copy_(0, every, rows[:, :, :4].index_select(0, every))

    seconds = time_on_device(copy) if probes.device == "cuda" else time_after_barrier(copy, CLOCK)[0]
    return seconds / (2 * repeats)


def time_message(size: int) -> float:
    send, wait = _exchange(size)
    wait(send())
    return time_after_barrier(lambda: wait(send()))[0]


def time_both(probes: Probes, size: int) -> list[float]:
    """Time compute alone, a message alone, and both at once."""
    forward, _ = _forward_and_backward(probes, rs.full(probes.tokens[-1]))
    send, wait = _exchange(size)

    def both() -> None:
        works = send()
        forward()
        wait(works)

    return [time_after_barrier(f)[0] for f in (forward, lambda: wait(send()), both)]


def _forward_and_backward(probes: Probes, mask: rs.Mask) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    shape = probes.shape
    options: dict[str, Any] = {"device": probes.device, "dtype": getattr(torch, shape.dtype)}
    queries, keys = mask.lengths
    sizes = ((shape.heads, queries), (shape.kv_heads, keys), (shape.kv_heads, keys))
    q, k, v = (torch.randn(shape.batch, *size, shape.head_dim, **options).requires_grad_() for size in sizes)
    grad = torch.randn_like(q)
    plan = rs.plan(mask, world=1, strategy="gather")
    config = config_for(plan, q, v, check_scale(None, shape.head_dim), probes.backend)
    return (
        lambda: attend_ranks([plan], [(q, k, v)], config, NullTransport().run)[0].out,
        lambda out: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
    )


def _exchange(size: int) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]:
    """Make functions that send a message to the next rank, receive one from the previous rank into new memory, and
    wait."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing = torch.ones(size, dtype=torch.uint8)  # not zeros: the system may map all pages of zeros to one

    def send() -> list[Any]:
        incoming = torch.empty(size, dtype=torch.uint8)
        operations = [
            dist.P2POp(dist.isend, outgoing, (rank + 1) % world),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % world),
        ]
        works: list[Any] = dist.batch_isend_irecv(operations)
        return works

    def wait(works: list[Any]) -> None:
        for work in works:
            work.wait()

    return send, wait


def time_after_barrier(f: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    """Run ``f`` after a barrier. Returns seconds and the result."""
    if dist.is_initialized():
        dist.barrier()
    start = clock()
    result = f()
    return clock() - start, result


def time_on_device(f: Callable[[], Any]) -> float:
    """Return the seconds on a GPU whose queue is never empty, as in training: back-to-back replays of a CUDA graph."""
    replay = captured(f) or f  # a call that cannot be captured includes its time on the host
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    for _ in range(GRAPH_REPLAYS):
        replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / GRAPH_REPLAYS * 1e-3


def as_round(ranks: Sequence[tuple[Any, ...]]) -> Round:
    return Round(*(np.array(part) for part in zip(*ranks, strict=True)))


def kernel_of(rounds: Sequence[Round], probes: Probes) -> FittedKernel:
    """Fit the kernel. The forward pass of rectangles with more queries than keys, or fewer, is left out: the engine also
    packs all keys in it, which the ranks of a plan do for their own keys only."""
    seconds = min_over_rounds([r.attention for r in rounds])
    timed = [
        TimedAttention(phase, mask.bands, float(seconds[m, p]))
        for m, mask in enumerate(probes.masks)
        for p, phase in enumerate(PHASES)
        if phase == "backward" or mask.lengths[0] == mask.lengths[1]
    ]
    return fit_kernel(timed, probes.shape)


def this_gpu(rounds: Sequence[Round], probes: Probes, like: Hardware) -> Hardware:
    """Make a Hardware with this GPU's kernel speed, copy speed and memory.

    Links and overlap, which one GPU cannot measure, are those of ``like``, and so are the passes over keys if the query
    heads of the probes do not share key heads.
    """
    kernel, copies = kernel_of(rounds, probes), copies_of(rounds, probes)
    device, shape = torch.cuda.get_device_properties(probes.device), probes.shape
    return replace(
        like,
        name="here",
        forward=kernel.forward,
        backward=kernel.backward,
        launch_s=kernel.launch_s,
        tile=kernel.tile,
        memory=device.total_memory,
        copy_bytes_per_s=copies.bytes_per_s,
        copy_launch_s=copies.launch_s,
        query_passes=kernel.query_byte_s * copies.bytes_per_s,
        key_passes=like.key_passes if kernel.key_byte_s is None else kernel.key_byte_s * copies.bytes_per_s,
        source=f"kernels measured on {device.name} with {_heads(shape)} of {shape.head_dim}, {shape.dtype}, "
        f"fit to {kernel.error:.1%} (windows excepted); links and overlap are those of {like.name}, not measured",
    )


def this_machine(rounds: Sequence[Round], probes: Probes) -> Hardware:
    """Return the processes of this machine as the ranks of one node."""
    kernel, copies = kernel_of(rounds, probes), copies_of(rounds, probes)
    world = len(rounds[0].attention)
    seconds = min_over_rounds([r.messages for r in rounds]).tolist()
    link = fit_link([Message(*timed) for timed in zip(MESSAGES, seconds, strict=True)])
    shape = probes.shape
    return Hardware(
        name="here",
        per_node=world,
        within=link,
        between=link,
        forward=kernel.forward,
        backward=kernel.backward,
        launch_s=kernel.launch_s,
        tile=kernel.tile,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world,
        copy_bytes_per_s=copies.bytes_per_s,
        copy_launch_s=copies.launch_s,
        query_passes=kernel.query_byte_s * copies.bytes_per_s,
        key_passes=(kernel.key_byte_s or 0.0) * copies.bytes_per_s,
        overlap=fit_overlap(*min_over_rounds([r.overlap for r in rounds]).tolist()),
        source=f"measured with {world} processes, {_heads(shape)} of {shape.head_dim}, {shape.dtype}; "
        f"kernels fit to {kernel.error:.1%} (windows excepted); the link between nodes is taken to be the same",
    )


def _heads(shape: rs.Shape) -> str:
    return f"{shape.heads} heads" if shape.kv_heads == shape.heads else f"{shape.heads} query and {shape.kv_heads} key heads"


def copies_of(rounds: Sequence[Round], probes: Probes) -> FittedCopies:
    sizes = [size for size, _ in COPIES[probes.device]]
    return fit_copies(sizes, min_over_rounds([r.copying for r in rounds]).tolist())


def min_over_rounds(rounds: Sequence[Seconds]) -> Seconds:
    """Return the maximum over ranks (axis 0), then minimum over rounds, for each quantity."""
    least: Seconds = np.min([seconds.max(axis=0) for seconds in rounds], axis=0)
    return least
