"""Small shares on a GPU: forward and backward of one rank of 8, executed step by step and replayed from a recording.

    python benchmarks/small_shares.py
    python benchmarks/small_shares.py --json
    python benchmarks/small_shares.py --only causal8k ring16k

Rank 3, 32 query and 8 key heads of 128, bfloat16, without messages. *Kernels* is the time of all kernels on the device.
*Host* is the time until the host has launched both passes, with nothing to wait for; *clock* is the time of a step when
steps follow each other. Where the host takes longer than the kernels, the clock shows the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringspan as rs
from ringspan.bench.timing import device_profile, step_seconds
from ringspan.engine import attend_ranks, config_for, pass_cache
from ringspan.planner import Plan
from ringspan.transports.null import NullTransport

WORLD, RANK, HEADS, KV_HEADS, HEAD_DIM = 8, 3, 32, 8, 128
ROUNDS = 30


def documents(number: int, tokens: int) -> rs.Mask:
    """Return documents of log-normal lengths, as in packed training data."""
    share = np.random.default_rng(0).lognormal(sigma=1.0, size=number)
    lengths = np.diff(np.round(np.cumsum([0.0, *share]) / share.sum() * tokens).astype(int))
    return rs.documents(lengths[lengths > 0])


# name -> mask and strategy
CASES: dict[str, tuple[Callable[[], rs.Mask], str]] = {
    "causal8k": (lambda: rs.causal(8192), "exchange(stages=1)"),
    "causal16k": (lambda: rs.causal(16384), "exchange(stages=1)"),
    "causal32k": (lambda: rs.causal(32768), "exchange(stages=1)"),
    "causal64k": (lambda: rs.causal(65536), "auto"),
    "ring16k": (lambda: rs.causal(16384), "ring"),
    "200 documents": (lambda: documents(200, 131072), "auto"),
    "28 documents": (lambda: documents(28, 131072), "auto"),
}


def step_of(plan: Plan) -> tuple[Callable[[], Tensor], Callable[[Tensor], object]]:
    """Return the forward and the backward pass of a rank, without messages."""
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    qkv = tuple(torch.randn(1, h, plan.q_rows, HEAD_DIM, **made) for h in (HEADS, KV_HEADS, KV_HEADS))
    config = config_for(plan, qkv[0], qkv[2], HEAD_DIM**-0.5, "auto")
    grad = torch.randn_like(qkv[0])
    return (
        lambda: attend_ranks([plan], [qkv], config, NullTransport().run)[0].out,
        lambda out: torch.autograd.grad(out, qkv, grad),
    )


def host_seconds(forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        backward(forward())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rows(only: list[str]) -> Iterator[dict[str, Any]]:
    devices = pass_cache.DEVICES
    for name in only:
        make_mask, strategy = CASES[name]
        plan = rs.plan(make_mask(), world=WORLD, strategy=strategy).for_heads(HEADS, KV_HEADS).at(RANK)
        row: dict[str, Any] = {"bench": "small_shares", "device": torch.cuda.get_device_name(), "case": name}
        row |= {"strategy": plan.strategy, "layout": plan.q_layout.name}
        for way in ("executed", "replayed"):
            pass_cache.DEVICES = devices if way == "replayed" else set()
            forward, backward = step_of(plan)
            for _ in range(5):
                backward(forward())
            row[f"clock_ms, {way}"] = round(step_seconds(lambda: backward(forward()), rounds=5, on_gpu=True) * 1e3, 2)  # noqa: B023
            row[f"host_us, {way}"] = round(host_seconds(forward, backward) * 1e6)
        row["kernels_ms"] = round(sum(device_profile(lambda: backward(forward())).values()) / 1e3, 2)  # noqa: B023
        yield row
    pass_cache.DEVICES = devices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases only")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each row as well")
    args = parser.parse_args()
    columns = f"{'case':13}  {'strategy':18}  {'layout':8}  kernels, ms"
    print(f"{columns}  host executed, µs  host replayed, µs  clock executed, ms  clock replayed, ms")
    for row in rows(args.only):
        hosts = "".join(f"  {row[f'host_us, {way}']:17}" for way in ("executed", "replayed"))
        clocks = "".join(f"  {row[f'clock_ms, {way}']:18.2f}" for way in ("executed", "replayed"))
        print(
            f"{row['case']:13}  {row['strategy']:18}  {row['layout']:8}  {row['kernels_ms']:11.2f}{hosts}{clocks}", flush=True
        )
        if args.json:
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
