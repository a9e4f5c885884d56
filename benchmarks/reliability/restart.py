"""Kill a rank of a training under ``torchrun --max-restarts``: it goes on from its checkpoint and ends with the same
loss.

    python -m benchmarks.reliability.restart [--trials N] [--jobs N]

Each trial kills rank 1 in another step. The losses are compared bit by bit with that of an undisturbed run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.reliability.experiments import Experiment, Rows, main_of, parser_of

TRAINING = Path(__file__).with_name("restart_training.py")


class Training(NamedTuple):
    """How a training ended. ``loss`` is the bits of its last loss, empty if it failed."""

    kill_at: int | None
    loss: str
    was_killed: bool
    seconds: float


def train(kill_at: int | None, deadline: float) -> list[Training]:
    """Train, and kill rank 1 in this step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", str(TRAINING), folder, *([] if kill_at is None else [str(kill_at)])]
        environment, start = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}, time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        loss, was_killed = Path(folder) / "loss", (Path(folder) / "killed").exists()
        if done.returncode:
            print(done.stderr[-8000:], file=sys.stderr)
        bits = loss.read_text() if done.returncode == 0 else ""
        return [Training(kill_at, bits, was_killed, time.monotonic() - start)]


def rows_of(found: list[Training]) -> Rows:
    """Compare the losses with that of the undisturbed training."""
    expected = next((x.loss for x in found if x.kill_at is None), "")
    rows: Rows = []
    for x in sorted(found, key=lambda x: -1 if x.kill_at is None else x.kill_at):
        name = "undisturbed" if x.kill_at is None else f"killed in step {x.kill_at}"
        same = "yes" if expected and x.loss == expected else "no"
        rows.append({"case": name, "kills": int(x.was_killed), "ends with the same loss": same, "seconds": round(x.seconds)})
    return rows


def experiment(trials: int) -> Experiment:
    kills = [None, *(1 + n % 7 for n in range(trials))]
    return Experiment(name="restarts", tasks=[partial(train, kill_at) for kill_at in kills], rows=rows_of, goal=trials + 1)


def main() -> None:
    args = parser_of(__doc__, 6).parse_args()
    main_of([experiment(args.trials)], args)


if __name__ == "__main__":
    main()
