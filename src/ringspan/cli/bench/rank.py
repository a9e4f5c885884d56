"""``ringspan bench rank``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch

from ringspan.bench import torch_baseline
from ringspan.bench.rank import MASKS, RankOptions, rank_rows
from ringspan.bench.rows import OnProgress, Row
from ringspan.cli.argument_types import at_least
from ringspan.errors import InputError
from ringspan.kernels import check_backend
from ringspan.strategies import parse_strategy

HELP = "the time of one rank's share against the whole on one device, without communication"

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
The time of one rank's share of attention, forward and backward, on one device. Communication is left out, so that
one device is enough; on a GPU received tensors hold random numbers, and the time that writes them is subtracted.

  whole         the kernel alone over the whole sequence
  slowest rank  the time of the slowest of the timed ranks for its share
  rank cost     slowest rank x ranks / whole: 1 means that splitting costs nothing but communication
  host          how long a forward call occupies the host, once everything is planned and compiled
  replay        the same for a forward call captured in a CUDA graph
  planned, kernel, held
                MiB of the plan's buffers, of the kernel beside them, and of the measured peak
"""


# Defaults of the options that depend on the device. On a CPU the measurement ends within a minute.
ON_A_GPU: dict[str, Any] = {
    "seq_len": [65536],
    "world": [8],
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "rounds": 5,
}
ON_A_CPU: dict[str, Any] = {
    "seq_len": [2048],
    "world": [4],
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "dtype": "float32",
    "rounds": 3,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    one = at_least(1)
    default = "default: %(default)s"
    add("--masks", nargs="+", default=["causal"], choices=[*MASKS], help="one or several, as below (default: causal)")
    add("--window", type=one, default=4096, metavar="N", help=f"keys before the query that --masks window shows ({default})")
    add("--seq-len", type=one, nargs="+", metavar="N", help=f"tokens ({_defaults('seq_len')})")
    add("--world", type=one, nargs="+", metavar="N", help=f"ranks ({_defaults('world')})")
    add("--ranks", type=at_least(0), nargs="+", default=None, metavar="N", help="which ranks to time (default: all)")
    add(
        "--strategies",
        nargs="+",
        default=["exchange(stages=2)", "gather", "ring"],
        help="default: 'exchange(stages=2)' gather ring",
    )
    add("--layout", nargs="+", default=["auto"], help="default: auto")
    add("--backends", nargs="+", default=["auto"], help="kernels of the ranks (default: auto)")
    add("--whole", default=None, help="the kernel of the whole (default: the first of --backends)")
    add(
        "--torch",
        nargs="+",
        default=[],
        choices=[*torch_baseline.BACKENDS],
        help="also measure PyTorch's own context_parallel with these backends (causal masks on a GPU only)",
    )
    add("--heads", type=one, metavar="N", help=f"query heads ({_defaults('heads')})")
    add("--kv-heads", type=one, metavar="N", help=f"key heads ({_defaults('kv_heads')})")
    add("--head-dim", type=one, metavar="N", help=_defaults("head_dim"))
    add("--dtype", choices=["float16", "bfloat16", "float32"], help=_defaults("dtype"))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help=default)
    add("--profile", action="store_true", help="add the time of every kernel on the device to the JSON (GPU only)")
    add("--cuda-graphs", action="store_true", help="capture the passes of the ranks in CUDA graphs (GPU only)")
    add("--rounds", type=one, metavar="N", help=f"rounds; the median counts ({_defaults('rounds')})")


def _defaults(name: str) -> str:
    gpu, cpu = (" ".join(map(str, x)) if isinstance(x, list) else x for x in (ON_A_GPU[name], ON_A_CPU[name]))
    return f"default: {gpu}, on a CPU {cpu}"


def fill_in(args: argparse.Namespace) -> None:
    """Set the options that were not given to the defaults of the device."""
    for name, value in (ON_A_CPU if args.device == "cpu" else ON_A_GPU).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def measure(args: argparse.Namespace, on_progress: OnProgress) -> Iterable[Row]:
    fill_in(args)
    check(args)
    given = {name: value for name, value in vars(args).items() if name in {field.name for field in fields(RankOptions)}}
    frozen: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    yield from rank_rows(RankOptions(**frozen), on_progress=on_progress)


def check(args: argparse.Namespace) -> None:
    """Reject what would fail later, before anything is measured."""
    try:
        here = torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {args.device} is not available: {str(error).splitlines()[0]}") from None
    on_gpu = here.is_cuda
    if on_gpu:
        torch.cuda.set_device(here.device)  # with its index, also if the user gave none
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
