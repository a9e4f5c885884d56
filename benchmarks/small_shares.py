"""Small shares on a GPU: forward and backward of one rank of 8, executed step by step, replayed from a recording, and
replayed from CUDA graphs (``cuda_graphs=True``).

    python benchmarks/small_shares.py
    python benchmarks/small_shares.py --json
    python benchmarks/small_shares.py --only causal8k ring16k

Rank 3, 32 query and 8 key heads of 128, bfloat16, without messages. *Kernels* is the time of all kernels on the device.
*Host* is the time until the host has launched both passes, with nothing to wait for; *clock* is the time of a step when
steps follow each other. Where the host takes longer than the kernels, the clock shows the host. *Graph memory* is that
of both captured passes.

Before a case is timed, the results of the three ways are compared, with messages that are all the same number. The
forward pass must agree in each bit. Kernels add to gradients in any order; these must agree to 2% of their maximum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringspan as rs
from ringspan.bench.timing import device_profile, step_seconds
from ringspan.engine import attend_ranks, config_for, pass_cache
from ringspan.engine.graph_replay import GraphedPass
from ringspan.planner import Plan
from ringspan.transports import PostExchange, RankGenerator
from ringspan.transports.null import NullTransport

WORLD, RANK, HEADS, KV_HEADS, HEAD_DIM = 8, 3, 32, 8, 128
ROUNDS = 30
WAYS = ("executed", "replayed", "graphs")


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


class ConstantMessages:
    """A transport that fills each receive buffer with the same number, so that results can be compared."""

    def run(self, generators: Sequence[RankGenerator[Any]], description: object = None) -> list[Any]:
        """Run each generator to its end and return their results."""
        return NullTransport().run([self._filled(generator) for generator in generators])

    def _filled(self, generator: RankGenerator[Any]) -> RankGenerator[Any]:
        while True:
            try:
                request = generator.send(None)
            except StopIteration as end:
                return end.value
            for _, buffer in request.recvs if isinstance(request, PostExchange) else ():
                buffer.fill_(0.125)
            yield request


class Steps:
    """The passes of a rank, in one of the ways."""

    def __init__(self, plan: Plan, way: str, transport: Any = NullTransport, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.plan, self.way, self.transport = plan, way, transport
        self.qkv = tuple(torch.randn(1, h, plan.q_rows, HEAD_DIM, **made) for h in (HEADS, KV_HEADS, KV_HEADS))
        self.grad = torch.randn(self.qkv[0].shape, **made)
        for x in self.qkv:
            x.requires_grad_()
        options = {"cuda_graphs": way == "graphs"}
        self.config = config_for(plan, self.qkv[0], self.qkv[2], HEAD_DIM**-0.5, "auto", **options)
        pass_cache.DEVICES = set() if way == "executed" else {"cuda"}

    def forward(self) -> Tensor:
        return attend_ranks([self.plan], [self.qkv], self.config, self.transport().run)[0].out  # type: ignore[list-item]

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.qkv, self.grad)

    def both(self) -> list[Tensor]:
        out = self.forward()
        return [out.detach(), *self.backward(out)]


def compare(plan: Plan) -> bool:
    """Compare the ways, and return whether the gradients have equal bits, too. Raise if a result is wrong."""
    expected = [Steps(plan, "executed", ConstantMessages, seed).both() for seed in range(2)]
    equal = True
    for way in WAYS[1:]:
        steps = [Steps(plan, way, ConstantMessages, seed) for seed in range(2)]
        for call in range(8):
            found = steps[call % 2].both()
            for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected[call % 2], strict=True):
                difference = (x.float() - y.float()).abs().max().item()
                if not difference <= (0.02 * y.abs().max().item() if name != "out" else 0.0):
                    raise AssertionError(f"{way}, call {call}: {name} differs by {difference}")
                equal &= torch.equal(x, y)
    return equal


def why_not_captured(plan: Plan) -> str | None:
    """Return why a pass is not captured, as one that is too large for graphs; None if both are."""
    found = [x for x in plan.derived(pass_cache.PassCache).passes.values() if isinstance(x, GraphedPass)]
    failures = [x.failure for x in found if x.captured is None]
    if len(found) == 2 and not failures:
        return None
    return f"{len(found)} passes of 2 were recorded for CUDA graphs; not captured: {failures}"


def host_seconds(steps: Steps) -> float:
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        steps.both()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def row_of(name: str) -> dict[str, Any]:
    make_mask, strategy = CASES[name]
    plan = rs.plan(make_mask(), world=WORLD, strategy=strategy).for_heads(HEADS, KV_HEADS).at(RANK)
    row: dict[str, Any] = {"bench": "small_shares", "device": torch.cuda.get_device_name(), "case": name}
    row |= {"strategy": plan.strategy, "layout": plan.q_layout.name}
    row["equal_bits"] = compare(plan)
    row["not_captured"] = why_not_captured(plan)
    for way in WAYS:
        rs.clear_caches()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        steps = Steps(plan, way)
        for _ in range(6):
            steps.both()
        row[f"clock_ms, {way}"] = round(step_seconds(steps.both, rounds=5, on_gpu=True) * 1e3, 2)
        row[f"host_us, {way}"] = round(host_seconds(steps) * 1e6)
        torch.cuda.empty_cache()
        row[f"held_mib, {way}"] = (torch.cuda.memory_reserved() - before) >> 20
    row["graph_mib"] = row["held_mib, graphs"] - row["held_mib, replayed"]
    steps = Steps(plan, "executed")
    row["kernels_ms"] = round(sum(device_profile(steps.both).values()) / 1e3, 2)
    return row


def rows(only: list[str]) -> Iterator[dict[str, Any] | None]:
    """Yield the row of each case; None if it failed or a result is wrong."""
    devices = pass_cache.DEVICES
    for name in only:
        try:
            yield row_of(name)
        except Exception:  # the other cases are still to be measured
            traceback.print_exc()
            yield None
    pass_cache.DEVICES = devices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases only")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each row as well")
    args = parser.parse_args()
    hosts, clocks = ([f"{what} {way}, {unit}" for way in WAYS] for what, unit in (("host", "µs"), ("clock", "ms")))
    print(f"{'case':13}  {'strategy':18}  {'layout':8}  kernels, ms  {'  '.join([*hosts, *clocks])}  graph memory, MiB")
    failed = False
    for row in rows(args.only):
        if row is None:
            failed = True
            continue
        line = f"{row['case']:13}  {row['strategy']:18}  {row['layout']:8}  {row['kernels_ms']:11.2f}"
        for way, title in zip(WAYS, hosts, strict=True):
            line += f"  {row[f'host_us, {way}']:{len(title)}}"
        for way, title in zip(WAYS, clocks, strict=True):
            line += f"  {row[f'clock_ms, {way}']:{len(title)}.2f}"
        print(f"{line}  {row['graph_mib']:17}", flush=True)
        if row["not_captured"]:
            print(f"  {row['not_captured']}", flush=True)
        if args.json:
            print(json.dumps(row), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
