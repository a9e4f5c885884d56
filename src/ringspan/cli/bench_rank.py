"""``ringspan bench rank``: what one rank's share costs, against the whole in one call on the same device.

The wire is left out (:class:`~ringspan.transports.silent.Silent`), so one device is enough. *Rank cost* is the slowest
rank's time × the number of ranks ÷ the time of the whole: 1.0 means that splitting costs nothing but the wire.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.engine import attend
from ringspan.frontends.attention import call_for
from ringspan.transports.silent import Silent

COLUMNS = {
    "mask": "mask",
    "strategy": "strategy",
    "layout": "layout",
    "world": "ranks",
    "whole_ms": "whole, ms",
    "slowest_ms": "slowest rank, ms",
    "rank_cost": "rank cost",
    "host_us": "host, µs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--masks", nargs="+", default=["causal"], choices=[*MASKS], help="default: causal")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[65536], help="tokens (default 65536; several may be given)")
    parser.add_argument("--world", type=int, default=8, help="ranks (default 8)")
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="which ranks to time (default: all)")
    parser.add_argument("--strategies", nargs="+", default=["exchange(stages=2)", "gather", "ring"])
    parser.add_argument("--layout", default="auto", help="default: auto")
    parser.add_argument("--backend", default="auto", help="the kernel, for rank and whole alike (default: auto)")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; the median counts (default 5)")


def _documents(n: int) -> rs.Mask:
    """28 documents of log-normal lengths, as packed training data has."""
    share = np.random.default_rng(0).lognormal(sigma=1.0, size=28)
    cuts = np.round(np.cumsum(share) / share.sum() * n).astype(int)
    return rs.documents(np.diff(np.concatenate([[0], cuts])))


MASKS: dict[str, Callable[[int], rs.Mask]] = {
    "causal": rs.causal,
    "full": rs.full,
    "window": lambda n: rs.causal(n) & rs.window(left=4096),
    "documents": _documents,
}


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each mask, length and strategy."""
    records = []
    for name in args.masks:
        for n in args.seq_len:
            mask = MASKS[name](n)
            whole = _time(_step(_whole(mask, args), *_tensors(n, args)), args)
            records += [_case(mask, whole, strategy, args) for strategy in args.strategies]
            torch.cuda.empty_cache()
    return records


def _case(mask: rs.Mask, whole: float, strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    first = rs.plan(mask, world=args.world, strategy=strategy, layout=args.layout)
    ranks = range(args.world) if args.ranks is None else args.ranks
    times, host = {}, 0.0
    for rank in ranks:
        plan = first.at(rank)
        step = _share(plan, args)
        times[rank] = _time(_step(step, *_tensors(plan.q_rows, args)), args)
        host = max(host, _host_time(step, *_tensors(plan.q_rows, args)))
    slowest = max(times.values())
    return {
        "bench": "rank",
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device,
        "mask": mask.name,
        "strategy": first.strategy,
        "layout": first.q_layout.name,
        "plan": first.digest,
        "world": args.world,
        "backend": args.backend,
        "heads": [args.heads, args.kv_heads],
        "head_dim": args.head_dim,
        "dtype": args.dtype,
        "whole_ms": round(whole * 1e3, 2),
        "rank_ms": {rank: round(t * 1e3, 2) for rank, t in times.items()},
        "slowest_ms": round(slowest * 1e3, 2),
        "rank_cost": round(slowest * args.world / whole, 3),
        "host_us": round(host * 1e6),
        "steps": len(first.program.forward),
    }


def _tensors(n: int, args: argparse.Namespace) -> list[Tensor]:
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    return [torch.randn(1, h, n, args.head_dim, **options) for h in (args.heads, args.kv_heads, args.kv_heads)]


def _whole(mask: rs.Mask, args: argparse.Namespace) -> Callable[..., Tensor]:
    """The whole sequence on one device: one rank that owns everything, through the same engine and kernel (on a CPU, causal is
    PyTorch's own call)."""
    (plan,) = rs.LocalWorld(1).plans(mask)
    if mask == rs.causal(mask.lengths[0]) and args.backend == "auto" and args.device == "cpu":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return _share(plan, args)


def _share(plan: rs.Plan, args: argparse.Namespace) -> Callable[..., Tensor]:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (result,) = attend([plan], [(q, k, v)], call_for(plan, q, v, None, args.backend), Silent().run)
        return result.out

    return step


def _step(attention: Callable[..., Tensor], *qkv: Tensor) -> Callable[[], None]:
    """Forward and backward."""
    leaves = [x.requires_grad_() for x in qkv]
    grad = torch.randn_like(attention(*leaves))

    def step() -> None:
        for x in leaves:
            x.grad = None
        attention(*leaves).backward(grad)

    return step


def _time(step: Callable[[], None], args: argparse.Namespace) -> float:
    """The median of the rounds, in seconds; the device is waited for before each reading of the clock."""
    wait = torch.cuda.synchronize if args.device.startswith("cuda") else lambda: None
    step()
    times = []
    for _ in range(args.rounds):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _host_time(attention: Callable[..., Tensor], *qkv: Tensor) -> float:
    """How long one forward call keeps the host, not waiting for the device."""
    times = []
    with torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            attention(*qkv)
            times.append(time.perf_counter() - start)
    return min(times)
