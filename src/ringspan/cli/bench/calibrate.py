"""``ringspan bench calibrate``: measure this machine, and write a file that ``hardware="here.json"`` reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch

import ringspan as rs
from ringspan.bench.calibrate import calibrate, hardware_rows
from ringspan.bench.calibration_rounds import Probes
from ringspan.bench.rows import OnProgress, Row
from ringspan.cli.argument_types import at_least
from ringspan.errors import InputError

HELP = "measure this machine for the cost model, and write a hardware file"

COLUMNS = {"what": "what", "value": "value", "unit": "unit"}

# Long enough for the kernel's best speed, short enough for a round of about a second.
TOKENS = {"cpu": (256, 512, 1024), "cuda": (1024, 4096, 8192, 16384)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, one = parser.add_argument, at_least(1)
    add("--world", type=one, default=2, metavar="N", help="processes on a CPU; at most as many as cores (default: %(default)s)")
    add("--out", type=Path, default=Path("here.json"), metavar="FILE", help="the file to write (default: %(default)s)")
    add("--device", choices=[*TOKENS], default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--like", default="h200x8", help="on a GPU: the hardware whose links to assume (default: %(default)s)")
    add("--backend", default="auto", help="the kernel (default: %(default)s)")
    add("--heads", type=one, default=4, metavar="N", help="query heads (default: %(default)s)")
    add("--kv-heads", type=one, default=None, metavar="N", help="key heads (default: as many as query heads)")
    add("--head-dim", type=one, default=64, metavar="N", help="default: %(default)s")
    add("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--tokens", type=one, nargs="+", default=None, metavar="N", help="lengths to time the kernel with, two or more")
    add("--rounds", type=one, default=10, metavar="N", help="rounds; the fastest counts (default: %(default)s)")


def measure(args: argparse.Namespace, on_progress: OnProgress) -> Iterable[Row]:
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    tokens = tuple(args.tokens or TOKENS[args.device])
    if len(set(tokens)) < 2:
        raise InputError(f"--tokens needs two lengths or more, to separate launch time and compute time; got {tokens}")
    if args.device == "cpu" and args.world < 2:
        raise InputError(f"--world must be at least 2, or there is no link to measure; got {args.world}")
    kv_heads = args.kv_heads or args.heads
    if args.heads % kv_heads:
        raise InputError(f"--kv-heads must divide --heads; got {kv_heads} and {args.heads}")
    shape = rs.Shape(heads=args.heads, kv_heads=kv_heads, head_dim=args.head_dim, dtype=dtype)
    probes = Probes(shape=shape, tokens=tokens, device=args.device, backend=args.backend)
    machine = calibrate(probes, world=args.world, like=args.like, rounds=args.rounds, on_progress=on_progress)
    args.out.write_text(machine.to_json() + "\n")
    for row in hardware_rows(machine):
        yield {"bench": "calibrate", "file": str(args.out), **row}
