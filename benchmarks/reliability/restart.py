"""Kill a rank of a training under ``torchrun --max-restarts``: it goes on from its checkpoint and ends with the same
loss.

    python -m benchmarks.reliability.restart [--trials N] [--json]

Each trial kills rank 1 in another step. The losses are compared bit by bit with that of an undisturbed run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.reliability.harness import parser_of, print_table

TRAINING = Path(__file__).with_name("restart_training.py")


def train(kill_at: int | None) -> tuple[str, bool, float]:
    """Return the bits of the last loss, whether a rank was killed, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
        ]
        command += [str(TRAINING), folder, *([] if kill_at is None else [str(kill_at)])]
        environment, start = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}, time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        loss, was_killed = Path(folder) / "loss", (Path(folder) / "killed").exists()
        if done.returncode:
            print(done.stderr[-8000:], file=sys.stderr)
        return loss.read_text() if done.returncode == 0 else "", was_killed, time.monotonic() - start


def main() -> None:
    args = parser_of(__doc__, 6).parse_args()
    expected, _, seconds = train(None)
    lines = [["undisturbed", "0", "yes" if expected else "no", f"{seconds:.0f}"]]
    for n in range(args.trials):
        loss, was_killed, seconds = train(1 + n % 7)
        same = "yes" if loss == expected and expected else "no"
        lines.append([f"killed in step {1 + n % 7}", str(int(was_killed)), same, f"{seconds:.0f}"])
    header = ["", "kills", "ends with the same loss", "seconds"]
    print_table(header, lines, as_json=args.json)


if __name__ == "__main__":
    main()
