"""The benchmarks run and print their tables. No test depends on speed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import ringspan as rs
from ringspan.bench import layouts as bench_layouts
from ringspan.bench.cost import summary as cost_summary
from ringspan.bench.layouts import fewest_rows, ptrr
from ringspan.cli.bench import cpu as bench_cpu
from ringspan.cli.bench import rank as bench_rank
from ringspan.cli.main import main
from ringspan.costs import named_hardware
from ringspan.layouts import Layout

SMALL = ["--heads=2", "--kv-heads=1", "--head-dim=8"]


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (["cpu", "--seq-len", "128", "--heads", "2", "--head-dim", "8", "--rounds", "1"], 3),
        (["plan", "--documents", "20", "--seq-len", "5000", "--world", "4"], 13),
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
def test_a_table_or_lines_of_json(arguments: list[str], cases: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("{") for line in lines)
    (rule,) = [n for n, line in enumerate(lines) if line.startswith("---")]
    assert len([line for line in lines[rule + 1 :] if line]) >= cases
    assert main(["bench", *arguments, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == cases
    assert all({"ringspan", "torch", "plan", "strategy"} <= set(record) for record in records)
    for record in records:
        if record["bench"] == "cpu":  # the figures of a row agree, up to rounding
            assert record["speedup"] == pytest.approx(record["one_s"] / record["many_s"], rel=0.2, abs=0.01)


def test_an_unknown_strategy_is_named_before_processes_are_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", "--strategies", "ring", "rng", "--seq-len", "64"]) == 2
    assert capsys.readouterr().err.startswith("ringspan bench: no strategy is called 'rng' (did you mean ring?)")


def test_what_was_measured_is_shown_if_a_later_measurement_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(args: object, on_progress: object) -> Iterator[dict[str, object]]:
        yield {"strategy": "ring", "one_s": 1.0}
        raise rs.KernelError("no more memory")

    monkeypatch.setattr(bench_cpu, "measure", measure)
    assert main(["bench", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "ring" in printed.out
    assert "no more memory" in printed.err


def test_bench_rank_has_small_defaults_on_a_cpu() -> None:
    parser = argparse.ArgumentParser()
    bench_rank.add_arguments(parser)
    args = parser.parse_args(["--device", "cpu", "--heads", "4"])
    bench_rank.fill_in(args)
    assert (args.seq_len, args.world, args.heads, args.dtype) == ([2048], [4], 4, "float32")
    args = parser.parse_args(["--device", "cuda"])
    bench_rank.fill_in(args)
    assert (args.seq_len, args.world, args.heads, args.dtype) == ([65536], [8], 32, "bfloat16")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--kv-heads", "3"], "--heads 2 must be a multiple of --kv-heads 3"),
        (["--ranks", "0", "2"], "--ranks 2: a world of 2 has ranks 0 … 1"),
        (["--device", "nowhere"], "--device nowhere is not available: "),
        (["--profile"], "--profile needs a GPU, and this is cpu"),
        (["--torch", "flash"], "--torch needs a GPU, and this is cpu"),
        (["--masks", "window"], "--window 4096 hides nothing of 64 tokens"),
        (["--backends", "fa5"], "no kernel is called 'fa5'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_invalid_options_of_rank(wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seq-len", "64", "--world", "2", "--device", "cpu", *SMALL, "--dtype", "float32", "--rounds", "1"]
    assert main(["bench", "rank", *small, *wrong]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--rounds", "--seq-len", "--world", "--heads", "--kv-heads", "--head-dim", "--window"])
def test_numbers_that_must_be_positive(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "rank", name, "0"])
    assert f"{name}: 0 is too small: at least 1" in capsys.readouterr().err


def test_rank_reports_the_chosen_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seq-len", "96", "--world", "4", "--ranks", "1", "--strategies", "ring", *SMALL, "--rounds", "1"]
    options = ["--masks", "window", "--window", "16", "--device", "cpu", "--dtype", "float32", "--json"]
    assert main(["bench", "rank", *small, *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["backend"], record["timed"], list(record["rank_ms"])) == ("cpu", "1", ["1"])
    assert record["mask"] == "causal(96) & window(left=16)"
    assert record["rank_cost"] == pytest.approx(record["slowest_ms"] * 4 / record["whole_ms"], rel=0.1)


def test_calibrate_writes_a_hardware_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.json"
    small = ["--tokens", "64", "192", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--rounds", "1"]
    assert main(["bench", "calibrate", "--device", "cpu", "--out", str(file), *small, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == 16
    machine = named_hardware(str(file))
    assert machine.per_node == 2
    assert "2 query and 1 key heads of 8" in machine.source
    assert min(machine.forward.full, machine.backward.window, machine.within.bytes_per_s) > 0
    assert 0 <= machine.overlap <= 1
    assert 0 <= machine.copy_launch_s < 0.1
    assert min(machine.query_passes, machine.key_passes) >= 0
    plan = rs.plan(rs.causal(64), world=2, hardware=str(file), shape=rs.Shape(heads=2, kv_heads=2, head_dim=8, dtype="float32"))
    assert plan.cost(str(file)).seconds > 0
    wrongs = {("--tokens", "64"): "two lengths or more", ("--world", "1"): "at least 2", ("--kv-heads", "3"): "must divide"}
    for wrong, said in wrongs.items():
        assert main(["bench", "calibrate", "--device", "cpu", "--out", str(file), *wrong]) == 2
        assert said in capsys.readouterr().err


def test_cost(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seq-len", "96", "--heads", "2", "4", "--head-dim", "8", "--rounds", "1", "--strategies", "ring", "pass_q"]
    assert main(["bench", "cost", *small, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    lines = cost_summary(records).splitlines()
    assert len(records) == 4 * 2 * 2
    assert all(r["ratio"] == pytest.approx(r["predicted_ms"] / r["measured_ms"], rel=0.05) for r in records)
    chosen = [r for r in records if "choice_busy" in r]
    assert len(chosen) == 4 * 2
    assert all(min(r["choice_measured"], r["choice_busy"]) >= 1 for r in chosen)
    for line, ratio in zip(lines[-2:], ("ratio", "busy_ratio"), strict=True):
        assert line.split()[1:4] == [str(sum(abs(r[ratio] - 1) <= 0.15 for r in records)), "of", "16"]


def test_layouts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways to draw lengths × two worlds × six layouts; rows are None where there are too many tiles to count."""
    arguments = ["--lengths", "zipf", "one-giant", "--seq-len", "3000", "--documents", "9", "--world", "2", "8"]
    monkeypatch.setattr(bench_layouts, "MAX_TILES", 1500)
    assert main(["bench", "layouts", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["bench", "layouts", *arguments, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == 2 * 2 * 6
    for record in records:
        assert record["balance"] >= 1
        assert record["pieces"] >= record["documents"]
    assert {record["rows"] is None for record in records if record["layout"] == "per_document"} == {False, True}
    assert len(lines) == len(records) + 2  # a header, a line of dashes


@pytest.mark.parametrize("lengths", [[8], [7, 1], [5, 3], [2, 4, 2]], ids=str)
def test_fewest_rows_is_a_lower_bound(lengths: list[int]) -> None:
    """Every way to give four of eight tokens to the first of two ranks, counted in the dense mask."""
    n, seen = sum(lengths), rs.documents(lengths).dense()
    for first in combinations(range(n), n // 2):
        mine = np.isin(np.arange(n), first)
        work = [int(seen[owned].sum()) for owned in (mine, ~mine)]
        rows = sum(int((seen[owned].any(axis=0) & ~owned).sum()) for owned in (mine, ~mine))
        assert rows >= fewest_rows(lengths, 2, 2 * max(work) / sum(work)), first


def test_ptrr() -> None:
    """Five blocks of two queries see 1, 2, 2, 3 and 4 blocks of keys; the heaviest first they go to ranks 0, 1, 1, 0,
    0."""
    assert ptrr(rs.documents([3, 7]), 2, block=2) == Layout([[(0, 2), (4, 6), (8, 10)], [(2, 4), (6, 8)]])
