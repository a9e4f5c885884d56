"""The time of one rank's share of attention against the whole sequence in one call on the same device.

Communication is left out (:class:`~ringspan.transports.null.NullTransport`), so one device is enough. On a GPU the rows
that a rank would receive are random numbers, and the time of the copies that write them is subtracted. *Rank cost* is
the time of the slowest rank × the number of ranks ÷ the time of the whole: 1.0 means that splitting costs nothing but
communication. A rank and the whole are timed in turn, because the clock of a device changes while it works. The slowest
rank is the one whose time is the largest fraction of that of the whole, measured in turn with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringspan as rs
from ringspan.bench import torch_baseline
from ringspan.bench.gpu_memory import held_bytes, scratch_bytes
from ringspan.bench.random_rows import RandomRows
from ringspan.bench.rows import OnProgress, Row, ignore_progress
from ringspan.bench.timing import device_profile, host_seconds, replay_seconds, seconds_in_turn
from ringspan.engine import attend_ranks, config_for
from ringspan.frontends.validate import check_scale
from ringspan.kernels import Saved
from ringspan.planner import peak_bytes
from ringspan.plans.data import PHASES
from ringspan.transports.null import NullTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What to measure. Sequences are combined with each other: a row for each combination."""

    masks: tuple[str, ...] = ("causal",)
    window: int = 4096
    seq_len: tuple[int, ...] = (65536,)
    world: tuple[int, ...] = (8,)
    ranks: tuple[int, ...] | None = None
    """Which ranks to time; None is all."""
    strategies: tuple[str, ...] = ("exchange(stages=2)", "gather", "ring")
    layout: tuple[str, ...] = ("auto",)
    backends: tuple[str, ...] = ("auto",)
    whole: str | None = None
    """The kernel for the whole sequence; None is the first of ``backends``."""
    torch: tuple[str, ...] = ()
    """Back ends to measure PyTorch's own context_parallel with."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    device: str = "cuda"
    profile: bool = False
    cuda_graphs: bool = False
    """Whether ranks capture their passes in CUDA graphs."""
    rounds: int = 5

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def _documents(n: int) -> rs.Mask:
    """Make 28 documents of log-normal lengths, as in packed training data."""
    share = np.random.default_rng(0).lognormal(sigma=1.0, size=28)
    cuts = np.round(np.cumsum(share) / share.sum() * n).astype(int)
    return rs.documents(np.diff(np.concatenate([[0], cuts])))


# name -> mask of a length and a window
MASKS: dict[str, Callable[[int, int], rs.Mask]] = {
    "causal": lambda n, _: rs.causal(n),
    "full": lambda n, _: rs.full(n),
    "window": lambda n, left: rs.causal(n) & rs.window(left=left),
    "documents": lambda n, _: _documents(n),
}


def rank_rows(options: RankOptions, *, on_progress: OnProgress = ignore_progress) -> Iterator[Row]:
    """Yield a row for each mask, length, world, layout, strategy and kernel."""
    per_mask = len(options.world) * len(options.backends) * len(options.layout) * len(options.strategies)
    done, total = 0, len(options.masks) * len(options.seq_len) * per_mask
    for name, n in product(options.masks, options.seq_len):
        mask = MASKS[name](n, options.window)
        on_progress(done, total, f"measuring {mask.name}, whole")
        whole = _whole(mask, options)
        profiled = {"whole_device_us": device_profile(whole)} if options.profile else {}
        for world in options.world:
            for backend, layout, strategy in product(options.backends, options.layout, options.strategies):
                on_progress(done, total, f"measuring {mask.name}, {world} ranks, {layout}, {strategy}, {backend}")
                first = rs.plan(mask, world=world, strategy=strategy, layout=layout).for_heads(options.heads, options.kv_heads)
                yield {**_record(mask, world, options), **_share_of(first, whole, backend, options), **profiled}
                done += 1
            if name == "causal":
                yield from (_torch(mask, world, whole, backend, options) for backend in options.torch)
        del whole  # it holds the tensors of the whole sequence
        if options.on_gpu:
            torch.cuda.empty_cache()


def _record(mask: rs.Mask, world: int, options: RankOptions) -> Row:
    """Return the fields that all measurements of a mask have in common."""
    return {
        "bench": "rank",
        "device": torch.cuda.get_device_name() if options.on_gpu else options.device,
        "mask": _short(mask.name),
        "world": world,
        **({"timed": " ".join(map(str, options.ranks))} if options.ranks else {}),
        "heads": [options.heads, options.kv_heads],
        "head_dim": options.head_dim,
        "dtype": options.dtype,
        **({"cuda_graphs": True} if options.cuda_graphs else {}),
    }


def _share_of(first: rs.Plan, whole: Callable[[], object], backend: str, options: RankOptions) -> Row:
    times: dict[int, list[float]] = {}
    host, replay = 0.0, 0.0
    memory: dict[str, Any] = {}
    for rank in range(first.world) if options.ranks is None else options.ranks:
        plan = first.at(rank)
        share, qkv = _share(plan, backend, cuda_graphs=options.cuda_graphs), _tensors(plan.q_rows, options)
        kernel: Any = config_for(plan, qkv[0], qkv[2], 1.0, backend).kernel
        times[rank] = _seconds(plan, whole, backend, options, *qkv)
        host = max(host, host_seconds(share, *qkv))
        if options.on_gpu:
            replay = max(replay, replay_seconds(share, *qkv))
            memory = {
                name: max(size, memory.get(name, 0)) for name, size in _memory(plan, share, backend, options, *qkv).items()
            }
    if options.profile:
        plan = first.at(_slowest(times))
        step = _step(_share(plan, backend, fill=RandomRows()), *_tensors(plan.q_rows, options))
        memory["device_us"] = device_profile(step)
    return {
        "backend": kernel.__name__.rpartition(".")[2],
        "strategy": first.strategy,
        "layout": first.q_layout.name,
        "plan": first.digest,
        **_times(times, first.world),
        "host_us": round(host * 1e6),
        **({"replay_us": round(replay * 1e6)} if replay else {}),
        "steps": len(first.program.forward),
        **memory,
    }


def _seconds(plan: rs.Plan, whole: Callable[[], object], backend: str, options: RankOptions, *qkv: Tensor) -> list[float]:
    """Return the seconds of a rank and of the whole, timed in turn."""
    if not options.on_gpu:
        return seconds_in_turn([_step(_share(plan, backend), *qkv), whole], rounds=options.rounds, on_gpu=False)
    fill = RandomRows()
    step = _step(_share(plan, backend, cuda_graphs=options.cuda_graphs, fill=fill), *qkv)
    steps = [step, whole, fill.alone(step)]
    share, of_whole, copies = seconds_in_turn(steps, rounds=options.rounds, on_gpu=True)
    return [share - copies, of_whole]


def _times(times: dict[int, list[float]], world: int) -> Row:
    """Return the fields of the times of each rank, and of the whole in turn with it."""
    share, whole = times[_slowest(times)]
    return {
        "whole_ms": round(whole * 1e3, 2),
        "rank_ms": {rank: round(t * 1e3, 2) for rank, (t, _) in times.items()},
        "slowest_ms": round(share * 1e3, 2),
        "rank_cost": round(share * world / whole, 3),
    }


def _slowest(times: dict[int, list[float]]) -> int:
    return max(times, key=lambda rank: times[rank][0] / times[rank][1])


def _memory(plan: rs.Plan, share: Callable[..., Tensor], backend: str, options: RankOptions, *qkv: Tensor) -> dict[str, int]:
    """Return the MiB of the plan's buffers, of the kernel beside them, and of the peak that was measured."""
    shape = rs.Shape(heads=options.heads, kv_heads=options.kv_heads, head_dim=options.head_dim, dtype=options.dtype)
    planned = max(peak_bytes(plan, shape, phase) for phase in PHASES)
    found = {"planned_mib": planned, "kernel_mib": scratch_bytes(plan, backend, *qkv), "held_mib": held_bytes(share, *qkv)}
    return {name: round(size / 2**20) for name, size in found.items()}


def _torch(mask: rs.Mask, world: int, whole: Callable[[], object], backend: str, options: RankOptions) -> Row:
    """Time PyTorch's own context parallelism, one rank at a time."""
    times = {}
    for rank in range(world) if options.ranks is None else options.ranks:
        with torch_baseline.rank_of(rank, world, backend, *_tensors(mask.lengths[0], options)) as step:
            times[rank] = seconds_in_turn([step, whole], rounds=options.rounds, on_gpu=options.on_gpu)
    return {
        **_record(mask, world, options),
        "backend": backend,
        "strategy": "torch context_parallel",
        "layout": "head-tail",
        **_times(times, world),
    }


def _tensors(n: int, options: RankOptions) -> list[Tensor]:
    made: dict[str, Any] = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    return [torch.randn(1, h, n, options.head_dim, **made) for h in (options.heads, options.kv_heads, options.kv_heads)]


def _whole(mask: rs.Mask, options: RankOptions) -> Callable[[], object]:
    """Make a function that runs forward and backward of the whole sequence by the kernel alone, without the engine and
    autograd."""
    backend = options.whole or options.backends[0]
    (plan,) = rs.LocalWorld(1).plans(mask)
    q, k, v = _tensors(mask.lengths[0], options)
    config = config_for(plan, q, v, check_scale(None, q.shape[-1]), backend)
    parts = list(config.kernel.attend(q, k, v, mask.bands, scale=config.scale))
    if len(parts) > 1:  # the kernel needs several calls for this mask, and their results have to be merged
        return _step(_share(plan, backend), q, k, v)
    dout = torch.randn_like(q)

    def step() -> None:
        ((_, _, (out, lse)),) = config.kernel.attend(q, k, v, mask.bands, scale=config.scale)
        for _ in config.kernel.attend_backward(Saved(q, dout, out, lse), k, v, mask.bands, scale=config.scale):
            pass

    return step


def _share(
    plan: rs.Plan, backend: str, *, cuda_graphs: bool = False, fill: Callable[[Tensor], None] | None = None
) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = config_for(plan, q, v, check_scale(None, q.shape[-1]), backend, cuda_graphs=cuda_graphs)
        (result,) = attend_ranks([plan], [(q, k, v)], config, NullTransport(fill=fill).run)
        return result.out

    return attention


def _step(attention: Callable[..., Tensor], *qkv: Tensor) -> Callable[[], object]:
    """Make a function that runs forward and backward. The gradients are dropped: in a model nothing keeps those of q, k
    and v."""
    leaves = [x.requires_grad_() for x in qkv]
    grad = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(attention(*leaves), leaves, grad)


def _short(name: str, limit: int = 40) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"
