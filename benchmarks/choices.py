"""What ``auto`` takes on this GPU, against the fastest of all strategies by the clock.

    ringspan bench calibrate --device cuda --heads 32 --kv-heads 8 --head-dim 128 --tokens 2048 8192 32768 \\
        --out here.json
    python benchmarks/choices.py --hardware here.json
    python benchmarks/choices.py --hardware here.json --json

One rank of 8, the one that computes longest by the cost model; 32 query and 8 key heads of 128, bfloat16. *Clock* is
the time of forward and backward on the device, from back-to-back replays of a CUDA graph, without messages: one GPU has
no links. The candidates of a case are timed in turn, since a GPU lowers its clocks after some seconds of work, and the
median of the rounds counts. *Wire* is the time that the messages add by the cost model, with the links of the hardware
file. The fastest strategy has the least sum of both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import ringspan as rs
from ringspan.bench.graphs import captured
from ringspan.bench.random_rows import RandomRows
from ringspan.bench.timing import seconds_in_turn
from ringspan.costs import Hardware, Link, named_hardware
from ringspan.engine import attend_ranks, config_for
from ringspan.planner import Plan
from ringspan.transports.null import NullTransport

WORLD = 8
SHAPE = rs.Shape(heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
STRATEGIES = ("exchange(stages=1)", "exchange(stages=2)", "gather(stages=1)", "ring", "ulysses", "pass_q(stages=2)")
ROUNDS = 3
CLOSE = 1.02


def documents(number: int, tokens: int) -> rs.Mask:
    """Return documents of log-normal lengths, as in packed training data."""
    share = np.random.default_rng(0).lognormal(sigma=1.0, size=number)
    lengths = np.diff(np.round(np.cumsum([0.0, *share]) / share.sum() * tokens).astype(int))
    return rs.documents(lengths[lengths > 0])


CASES: dict[str, Callable[[], rs.Mask]] = {
    "causal, 8,192": lambda: rs.causal(8192),
    "causal, 16,384": lambda: rs.causal(16384),
    "causal, 32,768": lambda: rs.causal(32768),
    "causal, 65,536": lambda: rs.causal(65536),
    "causal, 131,072": lambda: rs.causal(131072),
    "full, 32,768": lambda: rs.full(32768),
    "window of 4,096, 65,536": lambda: rs.causal(65536) & rs.window(left=4096),
    "window of 4,096, 131,072": lambda: rs.causal(131072) & rs.window(left=4096),
    "prefix of 16,384, 65,536": lambda: rs.prefix(65536, 16384),
    "28 documents, 131,072": lambda: documents(28, 131072),
    "200 documents, 131,072": lambda: documents(200, 131072),
    "28 documents, window of 4,096, 131,072": lambda: documents(28, 131072) & rs.window(left=4096),
}


def slowest_rank(plan: Plan, machine: Hardware) -> int:
    """Return the rank that computes longest, by the cost model."""
    cost = plan.cost(machine, SHAPE)
    computing = sum((phase.computed - phase.begin).sum(axis=1) for phase in (cost.forward, cost.backward))
    return cost.ranks[int(np.argmax(computing))]


def clock_seconds(plans: Sequence[Plan]) -> list[float]:
    """Return the seconds of forward and backward of each plan's rank, timed in turn."""
    steps = [step for plan in plans for step in replayed_steps(plan)]
    seconds = seconds_in_turn(steps, rounds=ROUNDS, on_gpu=True)
    return [both - copies for both, copies in zip(seconds[::2], seconds[1::2], strict=True)]


def replayed_steps(plan: Plan) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return forward and backward of a rank as the replay of a CUDA graph. Received rows are random numbers; the second
    function takes the time of the copies that write them."""
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    heads = (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    qkv = tuple(torch.randn(1, h, plan.q_rows, SHAPE.head_dim, **made) for h in heads)
    config = config_for(plan, qkv[0], qkv[2], SHAPE.head_dim**-0.5, "auto")
    grad = torch.randn_like(qkv[0])
    fill = RandomRows()

    def step() -> None:
        out = attend_ranks([plan], [qkv], config, NullTransport(fill=fill).run)[0].out
        torch.autograd.grad(out, qkv, grad)

    copies = fill.alone(step)  # and compiles
    replay, replay_copies = captured(step), captured(copies)
    if replay is None or replay_copies is None:
        raise SystemExit(f"{plan.strategy} cannot be captured in a CUDA graph with the kernel {config.kernel.__name__}")
    # The graphs read these tensors, but do not keep them.
    return lambda: (replay(), qkv, grad, fill), lambda: (replay_copies(), copies)


def wire_seconds(plan: Plan, machine: Hardware) -> float:
    """Return the seconds that messages add, by the cost model: with the links of the machine, less those with links
    that take no time."""
    no_time = Link(latency_s=0.0, bytes_per_s=float("inf"))
    return plan.cost(machine, SHAPE).seconds - plan.cost(replace(machine, within=no_time, between=no_time), SHAPE).seconds


def rows(machine: Hardware, only: list[str]) -> Iterator[dict[str, Any]]:
    for name in only:
        mask = CASES[name]()
        chosen = rs.plan(mask, world=WORLD, hardware=machine, shape=SHAPE).for_heads(SHAPE.heads, SHAPE.kv_heads)
        plans = {(str(chosen.strategy), chosen.q_layout.name): chosen}
        for strategy in STRATEGIES:
            plan = rs.plan(mask, world=WORLD, strategy=strategy, hardware=machine, shape=SHAPE)
            plan = plan.for_heads(SHAPE.heads, SHAPE.kv_heads)
            plans.setdefault((str(plan.strategy), plan.q_layout.name), plan)
        clocks = clock_seconds([plan.at(slowest_rank(plan, machine)) for plan in plans.values()])
        torch.cuda.empty_cache()  # the memory of the graphs
        times = {}
        for (key, plan), clock in zip(plans.items(), clocks, strict=True):
            wire, predicted = wire_seconds(plan, machine), plan.cost(machine, SHAPE).seconds
            times[key] = {"clock_ms": clock * 1e3, "wire_ms": wire * 1e3, "predicted_ms": predicted * 1e3}
        total = {key: ms["clock_ms"] + ms["wire_ms"] for key, ms in times.items()}
        best = min(total, key=total.__getitem__)
        auto = next(iter(plans))
        yield {
            "bench": "choices",
            "device": torch.cuda.get_device_name(),
            "case": name,
            "auto": " on ".join(auto),
            "fastest": " on ".join(best),
            "ratio": total[auto] / total[best],
            "candidates": {" on ".join(key): {k: round(v, 3) for k, v in ms.items()} for key, ms in times.items()},
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h200x8", help="a file of `ringspan bench calibrate`, or a name")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases only")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each row as well")
    args = parser.parse_args()
    print(f"{'mask, tokens':40}{'auto':45}{'clock + wire, ms':>16}  {'fastest':45}{'clock + wire, ms':>16}  ratio", flush=True)
    close = 0
    for row in rows(named_hardware(args.hardware), args.only):
        close += row["ratio"] <= CLOSE
        line = f"{row['case']:40}"
        for key in ("auto", "fastest"):
            ms = row["candidates"][row[key]]
            figures = f"{ms['clock_ms']:.2f} + {ms['wire_ms']:.2f}"
            line += f"{row[key]:45}{figures:>16}  "
        print(f"{line}{row['ratio']:.3f}", flush=True)
        if args.json:
            print(json.dumps(row), flush=True)
    print(f"{close} of {len(args.only)} choices are the fastest, or within 2 % of it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
