"""What a :class:`~ringspan.plans.Hardware` says of a machine, timed on this one: jobs for workers, and what follows from them.

A *round* times everything, on all ranks at the same time, because that is how they will work: processes on one machine share
its caches and its memory. Of several rounds the fastest counts: what else runs on a machine can only make things slower.
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
from ringspan.bench.fit import Kernel, Launch, Message, fit_kernel, fit_link, fit_overlap
from ringspan.bench.graphs import captured
from ringspan.costs import Hardware
from ringspan.engine import attend_ranks, config_for
from ringspan.frontends.validate import check_scale
from ringspan.plans.data import PHASES
from ringspan.transports.null import NullTransport

Seconds = NDArray[np.float64]

# Small ones for the latency, large ones for the bandwidth.
MESSAGES = (1 << 10, 1 << 20, 1 << 22, 1 << 24)
# Bytes, of which half are copied together and apart again. A GPU would not notice so few.
COPIED = {"cpu": 1 << 22, "cuda": 1 << 28}
# Replays in a row, on a GPU, and the least that a difference of two times counts: what it really is, noise may hide.
AHEAD = 10
LEAST = 1e-6
# The processor's time does not count what others take from a busy machine. A worker computes in one thread.
CLOCK = time.thread_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What is timed: the kernel on each kind of band in several sizes, for tensors of this shape."""

    shape: rs.Shape
    tokens: tuple[int, ...]
    device: str = "cpu"
    backend: str = "auto"

    @property
    def masks(self) -> list[rs.Mask]:
        """Each is one band: whole, cut by one diagonal, cut by two (a wide window and a narrow one)."""
        windows = [rs.causal(n) & rs.window(left=n // part) for n in self.tokens for part in (4, 8)]
        return [*map(rs.full, self.tokens), *map(rs.causal, self.tokens), *windows]


class Round(NamedTuple):
    """Seconds, by rank: of each mask and phase, of copying, of each message, and of computing, sending, and both at once."""

    launches: Seconds
    copying: Seconds
    messages: Seconds
    together: Seconds


def time_round(rank: int, probes: Probes) -> tuple[list[tuple[float, float]], float, list[float], list[float]]:
    """A job for all workers; also called without any, where there is one device and no wire."""
    wired = dist.is_initialized() and dist.get_world_size() > 1
    return (
        [time_launch(probes, mask) for mask in probes.masks],
        time_copy(probes),
        [time_message(size) for size in MESSAGES] if wired else [],
        time_both(probes, MESSAGES[-1]) if wired else [],
    )


def time_launch(probes: Probes, mask: rs.Mask) -> tuple[float, float]:
    """Forward and backward as the engine does them, with all that it does around the kernel."""
    forward, backward = _step(probes, mask)
    backward(forward())  # the first call takes memory and may compile
    if probes.device == "cuda":  # where backward follows forward in one graph
        ahead, both = (time_on_device(f) for f in (forward, lambda: backward(forward())))
        return ahead, max(both - ahead, LEAST)
    seconds, out = all_begin_alike(forward, CLOCK)
    return seconds, all_begin_alike(lambda: backward(out), CLOCK)[0]


def time_copy(probes: Probes) -> float:
    """Half of the heads of every row, copied together as a message is packed, and apart again as it is laid out."""
    rows, there = (torch.randn(COPIED[probes.device] // (8 * 64 * 4), 1, 8, 64, device=probes.device) for _ in range(2))
    every = torch.arange(len(rows), device=probes.device)

    def copy() -> None:
        there[:, :, 4:].index_copy_(0, every, rows[:, :, :4].index_select(0, every))

    return time_on_device(copy) if probes.device == "cuda" else all_begin_alike(copy, CLOCK)[0]


def time_message(size: int) -> float:
    send, wait = _exchange(size)
    wait(send())
    return all_begin_alike(lambda: wait(send()))[0]


def time_both(probes: Probes, size: int) -> list[float]:
    """Computing alone, a message alone, and computing while the message travels."""
    forward, _ = _step(probes, rs.full(probes.tokens[-1]))
    send, wait = _exchange(size)

    def both() -> None:
        under_way = send()
        forward()
        wait(under_way)

    return [all_begin_alike(f)[0] for f in (forward, lambda: wait(send()), both)]


def _step(probes: Probes, mask: rs.Mask) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    shape = probes.shape
    options: dict[str, Any] = {"device": probes.device, "dtype": getattr(torch, shape.dtype)}
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(shape.batch, h, mask.lengths[0], shape.head_dim, **options).requires_grad_() for h in heads)
    grad = torch.randn_like(q)
    plan = rs.plan(mask, world=1, strategy="gather")
    config = config_for(plan, q, v, check_scale(None, shape.head_dim), probes.backend)
    return (
        lambda: attend_ranks([plan], [(q, k, v)], config, NullTransport().run)[0].out,
        lambda out: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
    )


def _exchange(size: int) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]:
    """So many bytes to the next rank, and as many from the one before, which come into memory that nobody has used yet."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing = torch.ones(size, dtype=torch.uint8)  # not zeros: a system may keep all zeros in one place

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


def all_begin_alike(f: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    """How long it takes when all ranks begin at the same time, and its result."""
    if dist.is_initialized():
        dist.barrier()
    start = clock()
    result = f()
    return clock() - start, result


def time_on_device(f: Callable[[], Any]) -> float:
    """How long it takes a GPU whose host is ahead of it, as it is in training: a few times in a row, out of a CUDA graph."""
    replay = captured(f) or f  # what cannot be captured takes what its host takes
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    for _ in range(AHEAD):
        replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / AHEAD * 1e-3


def as_round(ranks: Sequence[tuple[Any, ...]]) -> Round:
    return Round(*(np.array(part) for part in zip(*ranks, strict=True)))


def kernel_of(rounds: Sequence[Round], probes: Probes) -> Kernel:
    seconds = fastest([r.launches for r in rounds])
    timed = [
        Launch(phase, mask.bands, float(seconds[m, p])) for m, mask in enumerate(probes.masks) for p, phase in enumerate(PHASES)
    ]
    return fit_kernel(timed, probes.shape)


def this_gpu(rounds: Sequence[Round], probes: Probes, like: Hardware) -> Hardware:
    """The kernels of this GPU; what one GPU cannot tell (links, overlap) as in another hardware."""
    kernel = kernel_of(rounds, probes)
    device, shape = torch.cuda.get_device_properties(probes.device), probes.shape
    return replace(
        like,
        name="here",
        forward=kernel.forward,
        backward=kernel.backward,
        launch_s=kernel.launch_s,
        tile=kernel.tile,
        memory=device.total_memory,
        copy_bytes_per_s=_copy_rate(rounds, probes),
        source=f"kernels measured on {device.name} with {shape.heads} heads of {shape.head_dim}, {shape.dtype}, "
        f"fit to {kernel.error:.1%} but for windows; links and overlap not measured but those of {like.name}",
    )


def this_machine(rounds: Sequence[Round], probes: Probes) -> Hardware:
    """The processes of this machine as the ranks of one node."""
    kernel = kernel_of(rounds, probes)
    world = len(rounds[0].launches)
    link = fit_link([Message(*timed) for timed in zip(MESSAGES, fastest([r.messages for r in rounds]).tolist(), strict=True)])
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
        copy_bytes_per_s=_copy_rate(rounds, probes),
        overlap=fit_overlap(*fastest([r.together for r in rounds]).tolist()),
        source=f"measured with {world} processes, {shape.heads} heads of {shape.head_dim}, {shape.dtype}; "
        f"kernels fit to {kernel.error:.1%} but for windows; there is one machine, so no other link between nodes was seen",
    )


def _copy_rate(rounds: Sequence[Round], probes: Probes) -> float:
    return float(COPIED[probes.device] / fastest([r.copying for r in rounds]))


def fastest(rounds: Sequence[Seconds]) -> Seconds:
    """Of each round what the slowest rank took (ranks are the first dim), and of these the least."""
    least: Seconds = np.min([seconds.max(axis=0) for seconds in rounds], axis=0)
    return least
