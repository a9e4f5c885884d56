"""What ``return_max_logits=True`` costs on a GPU: passes of one rank of 8 with and without it.

    python -m benchmarks.max_logits
    python -m benchmarks.max_logits --only causal64k --backend fa4 flex --json

Rank 3, 32 query and 8 key heads of 128, bfloat16, without messages. Times are those of the clock. *products* is the
speed at which queries and keys are multiplied for the largest logits: half of the operations of a forward pass.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from benchmarks.small_shares import HEAD_DIM, HEADS, KV_HEADS, RANK, WORLD, documents
from ringspan.bench.timing import step_seconds
from ringspan.engine import attend_ranks, attend_ranks_with_max_logits, config_for
from ringspan.planner import Plan
from ringspan.transports.null import NullTransport

ROUNDS = 5
CASES: dict[str, Callable[[], rs.Mask]] = {
    "causal16k": lambda: rs.causal(16384),
    "causal64k": lambda: rs.causal(65536),
    "causal256k": lambda: rs.causal(262144),
    "200 documents": lambda: documents(200, 131072),
}


def milliseconds(step: Callable[[], object]) -> float:
    for _ in range(3):  # executed, recorded, replayed
        step()
    return round(step_seconds(step, rounds=ROUNDS, on_gpu=True) * 1e3, 3)


def measure(plan: Plan, backend: str) -> dict[str, float]:
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    qkv = tuple(torch.randn(1, h, plan.q_rows, HEAD_DIM, **made) for h in (HEADS, KV_HEADS, KV_HEADS))
    config = config_for(plan, qkv[0], qkv[2], HEAD_DIM**-0.5, backend)
    dout, run = torch.randn_like(qkv[0]), NullTransport().run

    def plain() -> Tensor:
        return attend_ranks([plan], [qkv], config, run)[0].out  # type: ignore[list-item]

    def with_max_logits() -> Tensor:
        return attend_ranks_with_max_logits([plan], [qkv], config, run)[0][0].out  # type: ignore[list-item]

    found = {}
    for name, forward in (("plain", plain), ("max_logits", with_max_logits)):
        with torch.no_grad():
            found[f"forward_ms, {name}"] = milliseconds(forward)
        found[f"both_ms, {name}"] = milliseconds(lambda: torch.autograd.grad(forward(), qkv, dout))  # noqa: B023
    operations = 2 * plan.area * HEADS * HEAD_DIM
    more = found["forward_ms, max_logits"] - found["forward_ms, plain"]
    return found | {"products_tflops": round(operations / more / 1e9) if more > 0 else 0}


def rows(only: list[str], backends: list[str]) -> Iterator[dict[str, Any]]:
    for name in only:
        plan = rs.plan(CASES[name](), world=WORLD).for_heads(HEADS, KV_HEADS).at(RANK)
        for backend in backends:
            row = {"bench": "max_logits", "device": torch.cuda.get_device_name(), "case": name, "backend": backend}
            yield row | {"strategy": plan.strategy} | measure(plan, backend)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases only")
    parser.add_argument("--backend", nargs="+", default=["auto"], help="kernels")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each row as well")
    args = parser.parse_args()
    print(
        f"{'case':14} {'kernel':6}  {'forward, ms':>11}  {'+ logits':>8}  {'both, ms':>8}  {'+ logits':>8}  products, TFLOP/s"
    )
    for row in rows(args.only, args.backend):
        times = [row[f"{what}_ms, {way}"] for what in ("forward", "both") for way in ("plain", "max_logits")]
        text = "  ".join(f"{time:{width}.2f}" for time, width in zip(times, (11, 8, 8, 8), strict=True))
        print(f"{row['case']:14} {row['backend']:6}  {text}  {row['products_tflops']:17}", flush=True)
        if args.json:
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
