"""Programs that use a process group and end: every process must exit with code 0, on a machine under load.

    python -m benchmarks.reliability.exits [--trials N] [--load N] [--json]

The programs: the distributed example of the README, the examples, eight lines of shard, unshard and destroy, and the
same without destroy. ``--load`` processes compute in the background.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.reliability.harness import parser_of, print_table

ROOT = Path(__file__).parents[2]
BUSY = "while True: sum(range(10**6))"
EIGHT_LINES = """
import torch, torch.distributed as dist, ringspan as rs
dist.init_process_group("gloo")
cp = rs.ContextParallel(None, rs.causal(64))
x = cp.shard(torch.randn(1, 2, 64, 8), dim=2)
cp.unshard(cp.attention(x, x, x), dim=2)
del cp, x
dist.destroy_process_group()
"""


def programs() -> dict[str, str]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    readme = next(block for block in blocks if "init_process_group" in block)
    forgetful = EIGHT_LINES.replace("dist.destroy_process_group()\n", "")
    examples = {f"examples/{p.name}": p.read_text(encoding="utf-8") for p in sorted((ROOT / "examples").glob("*.py"))}
    return {"README": readme, "eight lines": EIGHT_LINES, "eight lines, no destroy": forgetful, **examples}


def run(program: Path, world: int) -> list[int]:
    """Run a program in processes of their own, as torchrun does, and return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": os.pathsep.join(sys.path)}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen([sys.executable, program], env={**os.environ, **common, **own}, **quiet))  # type: ignore[call-overload]
    codes = []
    for process in processes:
        _, errors = process.communicate(timeout=600)
        codes.append(process.returncode)
        if process.returncode:
            print(f"{program.name}: {process.returncode}: {errors.decode()[-600:]}", file=sys.stderr)
    return codes


def main() -> None:
    parser = parser_of(__doc__, 200)
    parser.add_argument("--load", type=int, default=2 * (os.cpu_count() or 1), help="busy processes (default 2 a core)")
    args = parser.parse_args()
    load = [subprocess.Popen(["nice", "-n", "5", sys.executable, "-c", BUSY]) for _ in range(args.load)]
    header = ["", "trials", "clean", "abort", "other", "seconds each"]
    try:
        print_table(header, run_all(args.trials), as_json=args.json)
    finally:
        for process in load:
            process.kill()
            process.wait()


def run_all(trials: int) -> Iterator[list[str]]:
    """Yield a line of the table for each program."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in programs().items():
            path = Path(folder) / f"{name.replace('/', '_').replace(' ', '_')}.py"
            count, start = Counter[str](), time.monotonic()
            path.write_text(text, encoding="utf-8")
            for _ in range(trials):
                codes = run(path, 2)
                aborted = any(code == -signal.SIGABRT for code in codes)
                count["clean" if not any(codes) else "abort" if aborted else "other"] += 1
            cells = [name, trials, count["clean"], count["abort"], count["other"]]
            yield [str(x) for x in cells] + [f"{(time.monotonic() - start) / max(1, trials):.1f}"]


if __name__ == "__main__":
    main()
