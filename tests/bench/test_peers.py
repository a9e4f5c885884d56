"""benchmarks/peers.py runs with what is installed, and all libraries are exact. No test depends on speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "peers.py"


@pytest.mark.slow
def test_the_ring_of_torch_and_ringspan_are_exact() -> None:
    options = ["--only", "torch ring, alltoall", "--world", "2", "--seq-len", "96", "--rounds", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PROGRAM), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["library"] for row in rows] == ["ringspan", "torch ring, alltoall"]
    for row in rows:
        assert list(row["errors"]) == ["out", "dq", "dk", "dv"]
        assert max(row["errors"].values()) <= 1e-5
        assert row["seconds"] > 0
