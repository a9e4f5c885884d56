"""The benchmarks on a GPU: figures that exist only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringspan.cli.main import main
from ringspan.costs import named_hardware

pytestmark = pytest.mark.gpu

SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--rounds", "1", "--json"]


def test_a_rank_with_graphs_memory_and_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that makes masks anew cannot be replayed, and is measured all the same."""
    masks = ["--masks", "causal", "window", "--window", "64", "--seq-len", "512", "--world", "2", "--strategies", "ring"]
    assert main(["bench", "rank", *masks, "--backends", "flash", "efficient", "--profile", *SMALL]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    replayed = {(record["backend"], "window" in record["mask"]): "replay_us" in record for record in records}
    assert replayed == {("flash", False): True, ("flash", True): True, ("efficient", False): True, ("efficient", True): False}
    for record in records:
        assert record["held_mib"] <= record["planned_mib"] + record["kernel_mib"] + 1
        assert sum(record["device_us"].values()) > 0
        assert sum(record["whole_device_us"].values()) > 0


@pytest.mark.parametrize("backend", ["auto", "efficient"])
def test_calibrate(backend: str, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    small = ["--tokens", "512", "2048", "--heads", "4", "--head-dim", "64", "--rounds", "1"]
    assert main(["bench", "calibrate", "--device", "cuda", "--backend", backend, "--out", str(file), *small]) == 0
    assert named_hardware(str(file)).forward.full > 1e12
