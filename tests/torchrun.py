"""Run a program with torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(program: Path, processes: int, *arguments: str) -> str:
    """The output of a program that torchrun starts in this many processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, str(program), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
