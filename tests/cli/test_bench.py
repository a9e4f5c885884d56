"""The benchmarks run and say what they should; how fast things are is no matter for a test."""

from __future__ import annotations

import json

import pytest

from ringspan.cli.main import main

SMALL = ["--heads=2", "--kv-heads=1", "--head-dim=8"]


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (["cpu", "--seq-len", "128", "--heads", "2", "--head-dim", "8", "--rounds", "1"], 3),
        (["plan", "--documents", "20", "--seq-len", "5000", "--world", "4"], 5),
        (
            [
                "rank",
                "--masks",
                "causal",
                "documents",
                "--seq-len",
                "256",
                "--world",
                "2",
                "--dtype",
                "float32",
                "--rounds",
                "1",
            ],
            6,
        ),
    ],
    ids=["cpu", "plan", "rank"],
)
def test_a_line_of_json_for_each_case_and_a_table(arguments: list[str], cases: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(records) == cases
    assert all({"ringspan", "torch", "plan", "strategy"} <= set(record) for record in records)
    assert any(line.startswith("---") for line in lines)
    assert main(["bench", *arguments, "--json"]) == 0
    assert all(json.loads(line) for line in capsys.readouterr().out.splitlines())
