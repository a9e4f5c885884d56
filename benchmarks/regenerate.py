"""Run the commands of docs/benchmarks.md again, and replace their output.

    python benchmarks/regenerate.py                    everything that this machine can measure
    python benchmarks/regenerate.py --only "bench cpu" only commands that contain this

Every block of the page that begins with ``$ ringspan bench`` or ``$ python benchmarks/`` is run unchanged. Its table is
replaced by the output, and the line below the block by the date, the device and the versions. Commands that need a GPU
are skipped if there is none.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"```\n\$ (?P<command>(?:ringspan bench |python benchmarks/)[^\n]*)\n.*?```\n\n\*Measured [^\n]*\*\n", re.S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only commands that contain this")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/benchmarks.md")
    args = parser.parse_args()
    page = args.page.read_text()
    failed = 0
    for block in BLOCK.finditer(page):
        command = block["command"]
        if args.only not in command:
            continue
        if " rank" in command and not torch.cuda.is_available():
            print(f"skipped, needs a GPU: {command}")
            continue
        print(f"$ {command}", flush=True)
        table = run(command)
        if table is None:
            failed += 1
            continue
        page = page.replace(block[0], f"```\n$ {command}\n{table}\n```\n\n*Measured {where()}.*\n")
        args.page.write_text(page)  # at once: a later command may fail
        print(table, flush=True)
    return 1 if failed else 0


def run(command: str) -> str | None:
    """Return the table that a command prints, or None if it failed. The error is printed."""
    code = "import sys; from ringspan.cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    program, *arguments = shlex.split(command)
    arguments = [sys.executable, *(["-c", code] if program == "ringspan" else []), *arguments]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=False)
    table = "\n".join(line for line in done.stdout.splitlines() if line and not line.startswith("{"))
    if done.returncode or not table:
        print(f"failed ({done.returncode}): {command}", file=sys.stderr)
        return None
    return table


def where() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores of {platform.machine()}"
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for package in ("triton", "flash-attn-4"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{datetime.date.today()} on {device}; {', '.join(versions)}"


if __name__ == "__main__":
    sys.exit(main())
