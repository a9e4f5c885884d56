"""Type checkers know the results of ``cp.shard``: they have the types of its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
from typing import assert_type

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import ringspan as rs


def check(cp: rs.ContextParallel, x: Tensor, batch: dict[str, Tensor], rows: NDArray[np.int64]) -> None:
    assert_type(cp.shard(x, dim=1), Tensor)
    assert_type(cp.shard(batch, dim=1), dict[str, Tensor])
    assert_type(cp.shard(rows, dim=0), NDArray[np.int64])
    assert_type(cp.shard(x, x, dim=1), tuple[Tensor, ...])
    assert_type(cp.unshard(x, dim=1), Tensor)
    assert_type(cp.mean(x, x), Tensor)
    cp.shard(x)  # type: ignore[call-overload]
"""


@pytest.mark.slow
def test_shard_keeps_the_types_of_its_arguments(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "typed.py"
    file.write_text(SOURCE)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path), str(file)]
    environment = {**os.environ, "MYPYPATH": str(root / "src")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
