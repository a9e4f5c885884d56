"""How much attention and copies of messages slow each other down on one GPU.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --tokens 131072 --json

One rank's share of causal attention runs on one stream. Copies of as many bytes as the plan receives run on another::

    host     cudaMemcpyAsync from pinned host memory: always the copy engine, at the speed of PCIe
    memcpy   cudaMemcpyAsync from another buffer of the device
    SM n     a kernel of n thread blocks, as NCCL copies: each block occupies a multiprocessor

*overlap* is the fraction of the overlapping time that is really saved, as in ``Hardware.overlap``:
``(attention + copies - both) / min(attention, copies)``. *slower* is how much longer attention takes while copies run
all the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import ringspan as rs
from ringspan.bench.graphs import captured
from ringspan.engine import attend_ranks, config_for
from ringspan.planner import Plan
from ringspan.transports.null import NullTransport

WORLD, HEADS, KV_HEADS, HEAD_DIM = 8, 32, 8, 128
BYTES_PER_TOKEN = 2 * KV_HEADS * HEAD_DIM * 2  # keys and values in bfloat16
SHARE = 0.8  # of the time of attention: copies last that long
BLOCK_NUMBERS = (4, 8, 16, 32)
HIGH_PRIORITY = -1  # else thread blocks of copies would start only when all those of attention have started
CHUNK = 4096  # 32-bit words that a block copies at a time


@triton.jit
def _copy_words(source, destination, words, times, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    for _ in range(times):
        for start in range(tl.program_id(0) * CHUNK, words, tl.num_programs(0) * CHUNK):
            offsets = start + tl.arange(0, CHUNK)
            tl.store(destination + offsets, tl.load(source + offsets, mask=offsets < words), mask=offsets < words)


Copy = Callable[[int], object]


def copiers(size: int) -> Iterator[tuple[str, Copy]]:
    """Yield functions that copy ``size`` bytes into a buffer of the device some number of times, each with its name."""
    source, destination = (torch.empty(size // 4, dtype=torch.int32, device="cuda") for _ in range(2))
    pinned = torch.empty(size // 4, dtype=torch.int32, pin_memory=True)

    def copy_from(x: Tensor, times: int) -> None:
        for _ in range(times):
            destination.copy_(x, non_blocking=True)

    def launch(blocks: int, times: int) -> None:  # one launch, as a message of NCCL is one
        _copy_words[(blocks,)](source, destination, len(source), times, CHUNK, num_warps=16)

    yield "host", partial(copy_from, pinned)
    yield "memcpy", partial(copy_from, source)
    for blocks in BLOCK_NUMBERS:
        yield f"SM {blocks}", partial(launch, blocks)


def share_of(plan: Plan) -> dict[str, Callable[[], object]]:
    """Return the forward pass, and both passes, of this rank without messages: as CUDA graphs, so that the host does not
    delay them."""
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    qkv = tuple(torch.randn(1, h, plan.q_rows, HEAD_DIM, **made) for h in (HEADS, KV_HEADS, KV_HEADS))
    config = config_for(plan, qkv[0], qkv[2], HEAD_DIM**-0.5, "auto")
    grad = torch.randn_like(qkv[0])

    def forward() -> Tensor:
        return attend_ranks([plan], [qkv], config, NullTransport().run)[0].out

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), qkv, grad)

    graphs = {"forward": captured(forward), "forward + backward": captured(both)}
    return {name: graph for name, graph in graphs.items() if graph is not None}


def seconds(first: Callable[[], object] | None, second: Callable[[], object] | None, rounds: int) -> float:
    """Return the median seconds until both are done, the second on another stream."""
    other, times = torch.cuda.Stream(priority=HIGH_PRIORITY), []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if second is not None:
            other.wait_event(start)
            with torch.cuda.stream(other):
                second()
        if first is not None:
            first()
        torch.cuda.current_stream().wait_stream(other)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(times[1:])


def while_copying(attention: Callable[[], object], copies: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of attention alone while copies run during all of it."""
    other, times = torch.cuda.Stream(priority=HIGH_PRIORITY), []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            copies()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        attention()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(times[1:])


def rows(tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    plan = rs.plan(rs.causal(tokens), world=WORLD, strategy="exchange(stages=1)").for_heads(HEADS, KV_HEADS).at(WORLD // 2)
    received = (tokens - plan.q_rows) * BYTES_PER_TOKEN
    for name, attention in share_of(plan).items():
        alone = seconds(attention, lambda: None, rounds)
        for copier, copy in copiers(received):
            once = seconds(None, partial(copy, 4), rounds) / 4
            copies = partial(copy, max(1, round(SHARE * alone / once)))
            copying = seconds(None, copies, rounds)
            both = seconds(attention, copies, rounds)
            during = while_copying(attention, partial(copy, int(3 * alone / once) + 2), rounds)
            yield {
                "bench": "overlap",
                "device": torch.cuda.get_device_name(),
                "mask": f"causal({tokens})",
                "world": WORLD,
                "attention": name,
                "copier": copier,
                "attention_ms": round(alone * 1e3, 3),
                "copies_ms": round(copying * 1e3, 3),
                "gb_per_s": round(received / once * 1e-9),
                "both_ms": round(both * 1e3, 3),
                "overlap": round((alone + copying - both) / min(alone, copying), 3),
                "slower": round(during / alone, 3),
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each row as well")
    args = parser.parse_args()
    print("tokens   attention           copies   GB/s  attention ms  copies ms  both ms  overlap  slower")
    for tokens in args.tokens:
        for row in rows(tokens, args.rounds):
            figures = [
                f"{row['gb_per_s']:5}",
                f"{row['attention_ms']:12.3f}",
                f"{row['copies_ms']:9.3f}",
                f"{row['both_ms']:7.3f}",
            ]
            texts = [f"{tokens:<7}", f"{row['attention']:18}", f"{row['copier']:7}"]
            print("  ".join([*texts, *figures, f"{row['overlap']:7.2f}", f"{row['slower']:6.2f}"]), flush=True)
            if args.json:
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
