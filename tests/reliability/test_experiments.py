"""A sample of each experiment of benchmarks/reliability: no trial is silent, hangs or aborts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def run(folder: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """Return the rows of an experiment."""
    file = folder / "rows.json"
    command = [sys.executable, "-m", f"benchmarks.reliability.{name}", "--json", str(file), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(file.read_text(encoding="utf-8")).values()
    assert found["done"] == found["goal"] > 0, found
    rows: list[dict[str, Any]] = found["rows"]
    return rows


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kills", ["--trials", "8"]),
        ("kills", ["--stop", "--trials", "1"]),
        ("mismatches", ["--trials", "15", "--jobs", "1"]),
    ],
    ids=["kills", "stops", "mismatches"],
)
def test_every_fault_is_named_on_every_rank(name: str, options: list[str], tmp_path: Path) -> None:
    rows = run(tmp_path, name, *options)
    assert rows[-1]["trials"] == int(options[options.index("--trials") + 1])
    assert all(row["named"] == row["trials"] for row in rows), rows


def test_mutated_files_raise_errors_of_ringspan(tmp_path: Path) -> None:
    for row in run(tmp_path, "mutations", "--trials", "1500"):
        assert row["other errors"] == row["over 200 MB"] == 0, row


def test_memory_does_not_grow(tmp_path: Path) -> None:
    for row in run(tmp_path, "leaks", "--trials", "200", "--cycles", "20"):
        assert float(row["growth"]) < 20.0, row


def test_calls_over_changing_masks_are_right(tmp_path: Path) -> None:
    (row,) = run(tmp_path, "soak", "--trials", "120")
    assert (row["calls"], row["wrong"]) == (120, 0)


def test_programs_exit_cleanly(tmp_path: Path) -> None:
    """The examples exit cleanly in tests/test_examples.py."""
    programs = ("README", "eight lines", "eight lines, no destroy")
    for row in run(tmp_path, "exits", "--trials", "1", "--fresh", "0", "--load", "2", "--programs", *programs):
        assert row["clean"] == row["trials"], row


def test_a_restarted_training_ends_with_the_same_loss(tmp_path: Path) -> None:
    rows = run(tmp_path, "restart", "--trials", "1")
    assert [(row["kills"], row["ends with the same loss"]) for row in rows] == [(0, "yes"), (1, "yes")]
