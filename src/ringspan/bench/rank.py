"""``ringspan bench rank``: what one rank's share costs, against the whole in one call on the same device.

The wire is left out (:class:`~ringspan.transports.null.NullTransport`), so one device is enough. *Rank cost* is the slowest
rank's time × the number of ranks ÷ the time of the whole: 1.0 means that splitting costs nothing but the wire.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import ringspan as rs
from ringspan.bench import torch_baseline as bench_torch
from ringspan.bench.graphs import captured
from ringspan.cli.numbers import at_least
from ringspan.engine import attend_ranks, config_for
from ringspan.errors import InputError
from ringspan.frontends.validate import check_scale
from ringspan.kernels import Saved, check_backend
from ringspan.planner import peak_bytes
from ringspan.plans.data import PHASES
from ringspan.strategies.registry import parse_strategy
from ringspan.transports.null import NullTransport

COLUMNS = {
    "mask": "mask",
    "backend": "kernel",
    "strategy": "strategy",
    "layout": "layout",
    "world": "ranks",
    "timed": "timed",
    "whole_ms": "whole, ms",
    "slowest_ms": "slowest rank, ms",
    "rank_cost": "rank cost",
    "host_us": "host, µs",
    "replay_us": "replay, µs",
    "steps": "steps",
    "planned_mib": "planned, MiB",
    "kernel_mib": "kernel, MiB",
    "held_mib": "held, MiB",
}


DESCRIPTION = """\
One rank's share of attention, forward and backward, on one device. The wire is left out, so that one device is
enough; what "arrives" is whatever memory held.

  whole         the kernel alone over the whole sequence
  slowest rank  the longest that any of the timed ranks takes for its share
  rank cost     slowest rank x ranks / whole: 1 means that splitting costs nothing but the wire
  host          how long a forward call keeps the host, once everything is planned and compiled
  replay        the same of a forward call that was captured in a CUDA graph
  planned, kernel, held
                MiB that the plan has for its buffers, that the kernel takes beside them, and that were held at once
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    one = at_least(1)
    default = "default: %(default)s"
    add(
        "--masks", nargs="+", default=["causal"], choices=[*MASKS], help="default: causal; several may be given, here and below"
    )
    add("--window", type=one, default=4096, metavar="N", help=f"how far back a query sees with --masks window ({default})")
    add("--seq-len", type=one, nargs="+", default=[65536], metavar="N", help="tokens (default: 65536)")
    add("--world", type=one, nargs="+", default=[8], metavar="N", help="ranks (default: 8)")
    add("--ranks", type=at_least(0), nargs="+", default=None, metavar="N", help="which ranks to time (default: all)")
    add(
        "--strategies",
        nargs="+",
        default=["exchange(stages=2)", "gather", "ring"],
        help="default: 'exchange(stages=2)' gather ring",
    )
    add("--layout", nargs="+", default=["auto"], help="default: auto")
    add("--backends", nargs="+", default=["auto"], help="kernels for the ranks (default: auto)")
    add("--whole", default=None, help="the kernel for the whole (default: the first of --backends)")
    add(
        "--torch",
        nargs="+",
        default=[],
        choices=[*bench_torch.BACKENDS],
        help="PyTorch's own context_parallel on these back ends in the same run (causal masks on a GPU only)",
    )
    add("--heads", type=one, default=32, metavar="N", help=f"query heads ({default})")
    add("--kv-heads", type=one, default=8, metavar="N", help=f"key heads ({default})")
    add("--head-dim", type=one, default=128, metavar="N", help=default)
    add("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"], help=default)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help=default)
    add("--profile", action="store_true", help="add to each JSON line what the device ran, by time (GPU only)")
    add("--rounds", type=one, default=5, metavar="N", help=f"timed rounds; the median counts ({default})")


def _check(args: argparse.Namespace) -> None:
    """What can be known to go wrong before anything is measured."""
    try:
        here = torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {args.device} is not there: {str(error).splitlines()[0]}") from None
    on_gpu = here.is_cuda
    if on_gpu:
        torch.cuda.set_device(here.device)  # which has a number, whether it was given one or not
    for strategy in args.strategies:
        if strategy != "auto":
            parse_strategy(strategy)
    for backend in (*args.backends, *filter(None, [args.whole])):
        check_backend(backend)
    if args.heads % args.kv_heads:
        raise InputError(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")
    for rank in args.ranks or ():
        if rank >= min(args.world):
            raise InputError(f"--ranks {rank}: a world of {min(args.world)} has ranks 0 … {min(args.world) - 1}")
    for name, given in (("--profile", args.profile), ("--torch", args.torch)):
        if given and not on_gpu:
            raise InputError(f"{name} needs a GPU, and this is {args.device}")
    if args.torch and "causal" not in args.masks:
        raise InputError("--torch measures causal masks only: give --masks causal, too")
    if "window" in args.masks and args.window >= min(args.seq_len):
        raise InputError(f"--window {args.window} hides nothing of {min(args.seq_len)} tokens: give a smaller one")


def _documents(n: int) -> rs.Mask:
    """28 documents of log-normal lengths, as packed training data has."""
    share = np.random.default_rng(0).lognormal(sigma=1.0, size=28)
    cuts = np.round(np.cumsum(share) / share.sum() * n).astype(int)
    return rs.documents(np.diff(np.concatenate([[0], cuts])))


# Of a length and a window.
MASKS: dict[str, Callable[[int, int], rs.Mask]] = {
    "causal": lambda n, _: rs.causal(n),
    "full": lambda n, _: rs.full(n),
    "window": lambda n, left: rs.causal(n) & rs.window(left=left),
    "documents": lambda n, _: _documents(n),
}


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each mask, length, world, layout, strategy and kernel."""
    _check(args)
    for name, n in product(args.masks, args.seq_len):
        mask = MASKS[name](n, args.window)
        step = _whole(mask, args)
        whole = _time(step, args)
        seen = {"whole_device_us": _profile(step)} if args.profile else {}
        del step  # it holds the tensors of the whole
        for world in args.world:
            for backend, layout, strategy in product(args.backends, args.layout, args.strategies):
                print(f"measuring {mask.name}, {world} ranks, {layout}, {strategy}, {backend} …", file=sys.stderr)
                first = rs.plan(mask, world=world, strategy=strategy, layout=layout).for_heads(args.heads, args.kv_heads)
                yield {**_record(mask, world, args), **_share_of(first, whole, backend, args), **seen}
            if name == "causal":
                yield from (_torch(mask, world, whole, backend, args) for backend in args.torch)
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()


def _record(mask: rs.Mask, world: int, args: argparse.Namespace) -> dict[str, Any]:
    """What is the same for all measurements of a mask."""
    return {
        "bench": "rank",
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device,
        "mask": _short(mask.name),
        "world": world,
        **({"timed": " ".join(map(str, args.ranks))} if args.ranks else {}),
        "heads": [args.heads, args.kv_heads],
        "head_dim": args.head_dim,
        "dtype": args.dtype,
    }


def _share_of(first: rs.Plan, whole: float, backend: str, args: argparse.Namespace) -> dict[str, Any]:
    ranks = range(first.world) if args.ranks is None else args.ranks
    times, host, replay = {}, 0.0, 0.0
    memory: dict[str, Any] = {}
    for rank in ranks:
        plan = first.at(rank)
        share, qkv = _share(plan, backend), _tensors(plan.q_rows, args)
        kernel: Any = config_for(plan, qkv[0], qkv[2], 1.0, backend).kernel
        times[rank] = _time(_step(share, *qkv), args)
        host = max(host, _host_time(share, args, *qkv))
        if args.device.startswith("cuda"):
            replay = max(replay, _replay_time(share, *qkv))
            memory = {name: max(size, memory.get(name, 0)) for name, size in _memory(plan, share, backend, args, *qkv).items()}
    slowest = max(times.values())
    if args.profile:
        plan = first.at(max(times, key=lambda rank: times[rank]))
        memory["device_us"] = _profile(_step(_share(plan, backend), *_tensors(plan.q_rows, args)))
    return {
        "backend": kernel.__name__.rpartition(".")[2],
        "strategy": first.strategy,
        "layout": first.q_layout.name,
        "plan": first.digest,
        "whole_ms": round(whole * 1e3, 2),
        "rank_ms": {rank: round(t * 1e3, 2) for rank, t in times.items()},
        "slowest_ms": round(slowest * 1e3, 2),
        "rank_cost": round(slowest * first.world / whole, 3),
        "host_us": round(host * 1e6),
        **({"replay_us": round(replay * 1e6)} if replay else {}),
        "steps": len(first.program.forward),
        **memory,
    }


def _torch(mask: rs.Mask, world: int, whole: float, backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """PyTorch's own context parallelism, one rank at a time."""
    ranks = range(world) if args.ranks is None else args.ranks
    times = {}
    for rank in ranks:
        with bench_torch.rank_of(rank, world, backend, *_tensors(mask.lengths[0], args)) as step:
            times[rank] = _time(step, args)
    slowest = max(times.values())
    return {
        **_record(mask, world, args),
        "backend": backend,
        "strategy": "torch context_parallel",
        "layout": "head-tail",
        "whole_ms": round(whole * 1e3, 2),
        "rank_ms": {rank: round(t * 1e3, 2) for rank, t in times.items()},
        "slowest_ms": round(slowest * 1e3, 2),
        "rank_cost": round(slowest * world / whole, 3),
    }


def _tensors(n: int, args: argparse.Namespace) -> list[Tensor]:
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    return [torch.randn(1, h, n, args.head_dim, **options) for h in (args.heads, args.kv_heads, args.kv_heads)]


def _whole(mask: rs.Mask, args: argparse.Namespace) -> Callable[[], object]:
    """The whole sequence on one device, by the kernel alone: no engine, no autograd around it."""
    backend = args.whole or args.backends[0]
    (plan,) = rs.LocalWorld(1).plans(mask)
    q, k, v = _tensors(mask.lengths[0], args)
    config = config_for(plan, q, v, check_scale(None, q.shape[-1]), backend)
    parts = list(config.kernel.attend(q, k, v, mask.bands, scale=config.scale))
    if len(parts) > 1:  # a kernel that has no one call for this mask: its parts have to be merged
        return _step(_share(plan, backend), q, k, v)
    dout = torch.randn_like(q)

    def step() -> None:
        ((_, _, (out, lse)),) = config.kernel.attend(q, k, v, mask.bands, scale=config.scale)
        for _ in config.kernel.attend_backward(Saved(q, dout, out, lse), k, v, mask.bands, scale=config.scale):
            pass

    return step


def _share(plan: rs.Plan, backend: str) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = config_for(plan, q, v, check_scale(None, q.shape[-1]), backend)
        (result,) = attend_ranks([plan], [(q, k, v)], config, NullTransport().run)
        return result.out

    return attention


def _step(attention: Callable[..., Tensor], *qkv: Tensor) -> Callable[[], object]:
    """Forward and backward, the gradients as they come: in a model nobody keeps those of q, k and v."""
    leaves = [x.requires_grad_() for x in qkv]
    grad = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(attention(*leaves), leaves, grad)


# What a round of timing lasts at least on a GPU, so that the host is ahead of it for most of the round, as it is in training.
ROUND_SECONDS = 0.1


def _time(step: Callable[[], object], args: argparse.Namespace) -> float:
    """The median of the rounds, in seconds for one step. The device is waited for at the end of a round."""
    on_gpu = args.device.startswith("cuda")
    wait = torch.cuda.synchronize if on_gpu else lambda: None

    def round_of(steps: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        return (time.perf_counter() - start) / steps

    round_of(1)  # compiles, and takes memory from the device
    steps = math.ceil(ROUND_SECONDS / round_of(1)) if on_gpu else 1
    return statistics.median(round_of(steps) for _ in range(args.rounds))


def _host_time(attention: Callable[..., Tensor], args: argparse.Namespace, *qkv: Tensor) -> float:
    """How long one forward call keeps the host, which is ahead of the device as it is in training."""
    wait = torch.cuda.synchronize if args.device.startswith("cuda") else lambda: None
    with torch.no_grad():
        return _on_host(lambda: attention(*qkv), wait)


def _on_host(call: Callable[[], object], wait: Callable[[], None]) -> float:
    """The median of ten calls; of five such, the least, since what else a host does can only make it slower."""

    def seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    medians = []
    for _ in range(5):
        wait()
        medians.append(statistics.median(seconds() for _ in range(10)))
    wait()
    return min(medians)


def _replay_time(attention: Callable[..., Tensor], *qkv: Tensor) -> float:
    """The same of a forward call out of a CUDA graph; 0, if it cannot be captured."""
    with torch.no_grad():
        replay = captured(lambda: attention(*qkv))
    return 0.0 if replay is None else _on_host(replay, torch.cuda.synchronize)


def _profile(step: Callable[[], object]) -> dict[str, int]:
    """How long the device took for each kernel in one step, in µs, the longest first."""
    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_device = [e for e in profiler.key_averages() if e.device_type.name == "CUDA"]
    longest = sorted((round(e.self_device_time_total), e.key) for e in on_device if not e.key.startswith("ringspan::"))
    return {name[:80]: time for time, name in reversed(longest)}


def _memory(
    plan: rs.Plan, share: Callable[..., Tensor], backend: str, args: argparse.Namespace, *qkv: Tensor
) -> dict[str, int]:
    """What the plan says it needs, what the kernel needs beside that, and what was held at once."""
    shape = rs.Shape(heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim, dtype=args.dtype)
    planned = max(peak_bytes(plan, shape, phase) for phase in PHASES)
    found = {"planned_mib": planned, "kernel_mib": _scratch(plan, backend, *qkv), "held_mib": _held(share, *qkv)}
    return {name: round(size / 2**20) for name, size in found.items()}


def _held(attention: Callable[..., Tensor], *qkv: Tensor) -> int:
    """The most memory that forward + backward took beyond what comes in and goes out, the kernels' own scratch included."""
    for x in qkv:
        x.grad = None
    dout = torch.ones_like(qkv[0])
    before = _start_of_peak()
    attention(*qkv).backward(dout)
    return torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())


def _scratch(plan: rs.Plan, backend: str, *qkv: Tensor) -> int:
    """What the kernel takes for its own results and scratch space, at most, in any task of the backward pass."""
    q, k, v = (x.detach() for x in qkv)
    config, most = config_for(plan, q, v, check_scale(None, q.shape[-1]), backend), 0
    for task in (task for step in plan.program.backward for task in step.tasks):
        rows = plan.program.kv_slots[task.kv_slot].rows
        keys, values = (x.new_zeros((*x.shape[:2], rows, x.shape[3])) for x in (k, v))
        saved = Saved(q, q, q, q.new_zeros(q.shape[:3], dtype=torch.float32))
        before = _start_of_peak()
        for _ in config.kernel.attend_backward(saved, keys, values, task.bands, scale=config.scale):
            pass
        most = max(most, torch.cuda.max_memory_allocated() - before)
    return most


def _start_of_peak() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _short(name: str, limit: int = 40) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"
