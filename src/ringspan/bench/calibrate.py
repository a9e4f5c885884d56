"""``ringspan bench calibrate``: measure this machine, and write a file that ``hardware="here.json"`` reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ringspan as rs
from ringspan.bench.calibration import Probes, as_round, this_gpu, this_machine, time_round
from ringspan.cli.progress import Progress
from ringspan.costs import Hardware, named_hardware
from ringspan.errors import InputError
from ringspan.testing.workers import Pool

COLUMNS = {"what": "what", "value": "value", "unit": "unit"}

# Long enough for the kernel's best speed, short enough for a round in about a second.
TOKENS = {"cpu": (256, 512, 1024), "cuda": (1024, 4096, 8192, 16384)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--world", type=int, default=2, help="how many processes, on a CPU (default 2; no more than you have cores)"
    )
    parser.add_argument("--out", type=Path, default=Path("here.json"), help="the file to write (default here.json)")
    parser.add_argument("--device", choices=[*TOKENS], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--like", default="h200x8", help="on one GPU: whose links to take, which it cannot tell (default h200x8)"
    )
    parser.add_argument("--backend", default="auto", help="the kernel (default auto)")
    parser.add_argument("--heads", type=int, default=4, help="query and key heads (default 4)")
    parser.add_argument("--head-dim", type=int, default=64, help="head dim (default 64)")
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="lengths of the kernel's probes, two or more")
    parser.add_argument("--rounds", type=int, default=10, help="rounds; the fastest counts (default 10)")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    tokens = tuple(args.tokens or TOKENS[args.device])
    if len(set(tokens)) < 2:
        raise InputError(
            f"--tokens needs two lengths or more, to tell what a launch costs from what a pair costs; got {tokens}"
        )
    if args.device == "cpu" and args.world < 2:
        raise InputError(f"--world must be at least 2, or there is no link to measure; got {args.world}")
    shape = rs.Shape(heads=args.heads, kv_heads=args.heads, head_dim=args.head_dim, dtype=dtype)
    machine = measure(Probes(shape=shape, tokens=tokens, device=args.device, backend=args.backend), args)
    args.out.write_text(machine.to_json() + "\n")
    return [{"bench": "calibrate", "file": str(args.out), **row} for row in rows(machine)]


def measure(probes: Probes, args: argparse.Namespace) -> Hardware:
    with Progress(args.rounds) as bar:

        def rounds(one: Any) -> list[Any]:
            found = []
            for n in range(args.rounds):
                found.append(as_round(one()))
                bar.update(n + 1, f"round {n + 1} of {args.rounds}")
            return found

        if probes.device == "cuda":
            return this_gpu(rounds(lambda: [time_round(0, probes)]), probes, named_hardware(args.like))
        with Pool(args.world, threads=1, timeout=1800) as pool:
            return this_machine(rounds(lambda: pool.run(time_round, probes)), probes)


def rows(machine: Hardware) -> Iterator[dict[str, Any]]:
    """The machine as a table."""

    def row(what: str, value: float, unit: str) -> dict[str, Any]:
        return {"what": what, "value": float(f"{value:.4g}"), "unit": unit}

    for phase, speed in (("forward", machine.forward), ("backward", machine.backward)):
        for kind, flops in (("rectangles", speed.full), ("one diagonal", speed.causal), ("two diagonals", speed.window)):
            yield row(f"{phase}, {kind}", flops / 1e9, "GFLOP/s")
    yield row("launch", machine.launch_s * 1e6, "µs")
    yield row("tile", machine.tile, "tokens")
    yield row("link, latency", machine.within.latency_s * 1e6, "µs")
    yield row("link, both ways at once", machine.within.bytes_per_s / 1e9, "GB/s")
    yield row("overlap", machine.overlap, "of what could be hidden")
    yield row("copying", machine.copy_bytes_per_s / 1e9, "GB/s")
    yield row("memory", machine.memory / 2**30, "GiB for each rank")
