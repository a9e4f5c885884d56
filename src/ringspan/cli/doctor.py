"""``ringspan doctor``: what is used on this machine and what is missing, then versions, an exchange between two
processes, and why kernels are not chosen."""

from __future__ import annotations

import argparse
import json
import platform
from collections import defaultdict
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.cli.argument_types import at_least
from ringspan.cli.loopback import try_loopback
from ringspan.engine import DTYPES
from ringspan.frontends.sdpa import missing
from ringspan.kernels import Inputs, availability, missing_packages

IN_PROCESS = "in process"

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=at_least(1), default=128, help="head dim of the tensors (default 128)")
    parser.add_argument("--v-dim", type=at_least(1), default=None, help="value dim, if different")
    parser.add_argument(
        "--dtype", choices=[*BY_NAME], nargs="+", default=["bfloat16", "float32"], help="default: bfloat16 float32"
    )
    parser.add_argument(
        "--timeout",
        type=at_least(1),
        default=60,
        metavar="S",
        help="seconds for the exchange between two processes, with their start (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")


def run(args: argparse.Namespace) -> int:
    found = examine(args.head_dim, args.v_dim or args.head_dim, args.dtype, args.timeout)
    print(json.dumps(found) if args.json else _text(found))
    return 0 if found["loopback"]["works"] else 1


def examine(head_dim: int, v_dim: int, dtypes: list[str], timeout: float) -> dict[str, Any]:
    """Return versions, devices, and for each device and dtype the chosen kernel, why others are not, and what they are
    missing."""
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    kernels = [
        {
            "device": device,
            "dtype": dtype,
            "head_dim": head_dim,
            "v_dim": v_dim,
            **_choice(Inputs(device=torch.device(device), dtype=BY_NAME[dtype], head_dim=head_dim, v_dim=v_dim)),
        }
        for device in devices
        for dtype in dtypes
    ]
    backends = [name for name, there in (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available)) if there()]
    return {
        "ringspan": rs.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "triton": find_spec("triton") is not None,
        "transports": [IN_PROCESS, *backends] if dist.is_available() else [IN_PROCESS],
        "sdpa_flash": {"current": rs.current(), "available": rs.available(), "missing": missing()},
        "devices": {d: torch.cuda.get_device_name(d) if d != "cpu" else platform.machine() for d in devices},
        "kernels": kernels,
        "loopback": try_loopback(timeout),
    }


def _choice(inputs: Inputs) -> dict[str, Any]:
    reasons = dict(availability(inputs))
    able = [name for name, reason in reasons.items() if reason is None]
    why_not = {name: reason for name, reason in reasons.items() if reason}
    return {"chosen": able[0] if able else None, "why_not": why_not, "lacks": missing_packages(inputs)}


def _text(found: dict[str, Any]) -> str:
    """Return a summary in a few lines, then the details."""
    lines = [
        *_titled("will use", _used(found)),
        *_titled("missing", _missing(found) or ["nothing"]),
        "",
        f"ringspan {found['ringspan']}, torch {found['torch']}, Python {found['python']}",
        f"transports  {', '.join(found['transports'])}",
    ]
    loopback = found["loopback"]
    lines.append(f"loopback    {'works' if loopback['works'] else 'FAILED'}: {loopback['text']} ({loopback['seconds']:.1f} s)")
    if list(found["devices"]) != ["cpu"]:
        merging = "one Triton kernel" if found["triton"] else "plain torch (pip install triton for one kernel)"
        lines += [f"merging     {merging}", f"sdpa flash  {_sdpa_flash(**found['sdpa_flash'])}"]
    for rows in _alike(found["kernels"]):
        row, reasons_of = rows[0], defaultdict(list)
        for name, reason in row["why_not"].items():
            reasons_of[reason].append(name)
        lines += ["", f"{row['device']}, {_dtypes(rows)}, head dim {_dims(row)}: {_chosen(row)}"]
        lines += [f"  not {', '.join(names)}: {reason}" for reason, names in reasons_of.items()]
    lines += ["", 'backend="reference" is exact on any device, dense and slow; it is used only by name']
    return "\n".join(lines)


def _used(found: dict[str, Any]) -> list[str]:
    lines = []
    for rows in _alike(found["kernels"]):
        device = rows[0]["device"]
        lines.append(f"{device} ({found['devices'][device]}), {_dtypes(rows)}: {_chosen(rows[0])}")
    between = [name for name in found["transports"] if name != IN_PROCESS]
    return [*lines, f"{' or '.join(between) or 'nothing'} between processes"]


def _missing(found: dict[str, Any]) -> list[str]:
    """Return the devices and packages that ringspan could use and that are missing."""
    if list(found["devices"]) == ["cpu"]:
        return ["a CUDA device: without one attention is computed on the CPU"]
    lacks = {name: package for row in found["kernels"] for name, package in row["lacks"].items()}
    parts = [f"{package}, for the kernel {name}: pip install {package}" for name, package in lacks.items()]
    return [*parts, *([] if "nccl" in found["transports"] else ["nccl, for several GPUs: this PyTorch was built without it"])]


def _titled(title: str, lines: list[str]) -> list[str]:
    return [f"{title if n == 0 else '':10}{line}" for n, line in enumerate(lines)]


def _alike(kernels: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows, grouped if they differ in the dtype only."""
    return [list(rows) for _, rows in groupby(kernels, key=lambda row: (row["device"], row["chosen"], row["why_not"]))]


def _dtypes(rows: list[dict[str, Any]]) -> str:
    return " and ".join(row["dtype"] for row in rows)


def _dims(row: dict[str, Any]) -> str:
    return f"{row['head_dim']}" if row["head_dim"] == row["v_dim"] else f"{row['head_dim']}/{row['v_dim']}"


def _chosen(row: dict[str, Any]) -> str:
    return f"kernel {row['chosen']}" if row["chosen"] else 'no fast kernel; backend="reference" is exact and slow'


def _sdpa_flash(current: str | None, available: list[str], missing: dict[str, str]) -> str:
    parts = [f"{current or 'the one of PyTorch'} is active"]
    parts += [f'{name} can be activated with rs.activate("{name}")' for name in available if name != current]
    parts += [f"{name} is not installed: pip install {package}" for name, package in missing.items()]
    return "; ".join(parts)
