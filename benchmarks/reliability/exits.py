"""Programs that use a process group and end: every process must exit with code 0, on a machine under load.

    python -m benchmarks.reliability.exits [--trials N] [--fresh N] [--load N] [--jobs N]

The programs: the distributed example of the README, the examples, eight lines of shard, unshard and destroy, and the
same without destroy. ``--trials`` of each are started by forking a process that has imported torch; ``--fresh`` of each
are new interpreters. ``--load`` processes compute in the background.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.reliability.experiments import Experiment, Rows, Task, main_of, parser_of
from benchmarks.reliability.fork_exits import HANG_SECONDS, OPTIONAL, environment, free_port

ROOT = Path(__file__).parents[2]
CHUNK = 20  # trials that are forked from one process
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


class Exit(NamedTuple):
    """The exit codes of the ranks of one trial."""

    program: str
    is_fresh: bool
    codes: tuple[int, ...]

    @property
    def outcome(self) -> str:
        return "clean" if not any(self.codes) else "abort" if -signal.SIGABRT in self.codes else "other"


def programs() -> dict[str, str]:
    """Return the programs that can run here. Some examples need other packages."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    readme = next(block for block in blocks if "init_process_group" in block)
    forgetful = EIGHT_LINES.replace("dist.destroy_process_group()\n", "")
    examples = {f"examples/{p.name}": p.read_text(encoding="utf-8") for p in sorted((ROOT / "examples").glob("*.py"))}
    for package in OPTIONAL:
        if importlib.util.find_spec(package) is None:
            examples = {name: text for name, text in examples.items() if f"from {package} import" not in text}
    return {"README": readme, "eight lines": EIGHT_LINES, "eight lines, no destroy": forgetful, **examples}


@contextmanager
def written(text: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(text, encoding="utf-8")
        yield path


def run_forked(name: str, text: str, trials: int, deadline: float) -> list[Exit]:
    with written(text) as program:
        command = [sys.executable, "-m", "benchmarks.reliability.fork_exits", str(program), str(trials), str(deadline)]
        found = subprocess.run(command, env=with_path(), stdout=subprocess.PIPE, text=True, check=True)
    return [Exit(name, False, tuple(json.loads(line))) for line in found.stdout.splitlines()]


def run_fresh(name: str, text: str, deadline: float) -> list[Exit]:
    """Start new interpreters, as torchrun does."""
    world, port, codes = 2, free_port(), []
    with written(text) as program:
        processes = [
            subprocess.Popen(
                [sys.executable, program],
                env={**with_path(), **environment(rank, world, port)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for rank in range(world)
        ]
        for process in processes:
            _, errors = process.communicate(timeout=2 * HANG_SECONDS)
            codes.append(process.returncode)
            if process.returncode:
                print(f"{name}: {process.returncode}: {errors.decode()[-600:]}", file=sys.stderr)
    return [Exit(name, True, tuple(codes))]


def with_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


@contextmanager
def load(count: int) -> Iterator[None]:
    """Keep the machine busy."""
    processes = [subprocess.Popen(["nice", "-n", "5", sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rows_of(found: list[Exit]) -> Rows:
    rows: Rows = []
    for name in programs():
        mine = [x for x in found if x.program == name]
        if not mine:
            continue
        row: dict[str, object] = {"case": name, "trials": len(mine), "of them new interpreters": sum(x.is_fresh for x in mine)}
        rows.append({**row, **{kind: sum(x.outcome == kind for x in mine) for kind in ("clean", "abort", "other")}})
    return rows


def experiment(trials: int, fresh: int, names: Sequence[str] = ()) -> Experiment:
    """Run programs of these names, all if there are none."""
    chosen = {name: text for name, text in programs().items() if not names or name in names}
    tasks: list[Task] = []
    for first in range(0, trials, CHUNK):
        tasks += [partial(run_forked, name, text, min(CHUNK, trials - first)) for name, text in chosen.items()]
    for _ in range(fresh):
        tasks += [partial(run_fresh, name, text) for name, text in chosen.items()]
    return Experiment(name="exits", tasks=tasks, rows=rows_of, goal=(trials + fresh) * len(chosen))


def main() -> None:
    parser = parser_of(__doc__, 200)
    parser.add_argument("--fresh", type=int, default=5, help="new interpreters for each program (default %(default)s)")
    parser.add_argument("--load", type=int, default=2 * (os.cpu_count() or 1), help="busy processes (default 2 a core)")
    parser.add_argument("--programs", nargs="+", default=[], metavar="NAME", help="only these: README, 'eight lines', …")
    args = parser.parse_args()
    with load(args.load):
        main_of([experiment(args.trials, args.fresh, args.programs)], args)


if __name__ == "__main__":
    main()
