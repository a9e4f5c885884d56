"""``ringspan doctor``: what this machine has, which kernel would serve which tensors, and why another would not."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.engine import DTYPES
from ringspan.frontends.activate import missing
from ringspan.kernels import Inputs, reasons

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=int, default=128, help="head dim to ask the kernels about (default 128)")
    parser.add_argument("--v-dim", type=int, default=None, help="value dim, if another")
    parser.add_argument(
        "--dtype", choices=[*BY_NAME], nargs="+", default=["bfloat16", "float32"], help="default: bfloat16 float32"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")


def run(args: argparse.Namespace) -> int:
    found = examine(args.head_dim, args.v_dim or args.head_dim, args.dtype)
    print(json.dumps(found) if args.json else _text(found))
    return 0


def examine(head_dim: int, v_dim: int, dtypes: list[str]) -> dict[str, Any]:
    """Versions, devices, and for each device and dtype what every kernel says of itself (None: it can serve)."""
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    backends = [name for name, there in (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available)) if there()]
    return {
        "ringspan": rs.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "triton": find_spec("triton") is not None,
        "transports": ["in process", *backends] if dist.is_available() else ["in process"],
        "sdpa_flash": {"current": rs.current(), "available": rs.available(), "missing": missing()},
        "devices": {d: torch.cuda.get_device_name(d) if d != "cpu" else platform.machine() for d in devices},
        "kernels": [
            {
                "device": device,
                "dtype": dtype,
                "head_dim": head_dim,
                "v_dim": v_dim,
                **_choice(Inputs(device=torch.device(device), dtype=BY_NAME[dtype], head_dim=head_dim, v_dim=v_dim)),
            }
            for device in devices
            for dtype in dtypes
        ],
    }


def _choice(inputs: Inputs) -> dict[str, Any]:
    said = dict(reasons(inputs))
    able = [name for name, reason in said.items() if reason is None]
    return {"chosen": able[0] if able else None, "why_not": {name: reason for name, reason in said.items() if reason}}


def _text(found: dict[str, Any]) -> str:
    lines = [
        f"ringspan {found['ringspan']}, torch {found['torch']}, Python {found['python']}",
        f"transports  {', '.join(found['transports'])}",
        f"merging     {'one Triton kernel' if found['triton'] else 'plain torch (pip install triton for one kernel)'} on CUDA",
        f"sdpa flash  {_sdpa_flash(**found['sdpa_flash'])}",
        *(f"device      {device}: {name}" for device, name in found["devices"].items()),
    ]
    for row in found["kernels"]:
        dims = row["head_dim"] if row["head_dim"] == row["v_dim"] else f"{row['head_dim']}/{row['v_dim']}"
        chosen = f"kernel {row['chosen']}" if row["chosen"] else 'no fast kernel; backend="reference" is exact and slow'
        lines += ["", f"{row['device']}, {row['dtype']}, head dim {dims}: {chosen}"]
        lines += [f"  {name} {reason}" for name, reason in row["why_not"].items()]
    return "\n".join(lines)


def _sdpa_flash(current: str | None, available: list[str], missing: dict[str, str]) -> str:
    said = [f"{current or 'the one of PyTorch'} is active"]
    said += [f'{name} is one rs.activate("{name}") away' for name in available if name != current]
    said += [f"{name} is not installed: pip install {package}" for name, package in missing.items()]
    return "; ".join(said)
