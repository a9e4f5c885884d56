"""The picture of a packed batch is drawn, and what it shows is the microbatch of the plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringspan as rs
from ringspan.bench.packing import WAYS
from ringspan.cli.batch_picture import (
    DOCUMENT_COLOURS,
    LOAD_COLOURS,
    OTHER_DOCUMENTS,
    bytes_between,
    document_colours,
    draw_batch,
    ideal_seconds,
    loads_of,
    runs_of,
)
from ringspan.cli.bench import pack as command
from ringspan.cli.main import main
from ringspan.costs.hardware import hardware

SHAPE = rs.Shape(heads=4, kv_heads=2, head_dim=8)


def packed(lengths: list[int], world: int, tokens_per_rank: int, machine: str = "h200x2") -> rs.Microbatch:
    part, *_ = rs.pack(lengths, world, tokens_per_rank=tokens_per_rank, hardware=machine, shape=SHAPE)
    return part


def test_bytes_between_nodes() -> None:
    """Two ranks on two nodes, and a document that is cut in the middle: the later half needs the keys of the first.

    Forward, 4 rows of 2 heads × (8 + 8) numbers of 2 bytes. Backward, these again, and their gradients in float32.
    """
    part = packed([8], 2, 4)
    plan = rs.plan(part.mask, world=2, layout="contiguous", strategy="exchange")
    part = rs.Microbatch(documents=part.documents, lengths=part.lengths, plan=plan)
    found = bytes_between(part, 1, SHAPE)
    assert found.tolist() == [[0, 2 * 4 * 2 * 16 * 2], [4 * 2 * 16 * 4, 0]]


def test_every_row_of_a_rank_is_drawn_with_its_document() -> None:
    part = packed([90, 3, 30, 8, 5], 4, 36)
    document_of_token = [i for i, n in enumerate(part.lengths) for _ in range(n)]
    for rank in range(4):
        drawn = [run.document for run in runs_of(part, rank) for _ in range(run.rows)]
        assert drawn == [document_of_token[token] for token in part.layout.positions(rank).tolist()]
        rows = [run.rows for run in runs_of(part, rank)]
        assert [run.start for run in runs_of(part, rank)] == [sum(rows[:i]) for i in range(len(rows))]


def test_loads_end_at_the_predicted_time_on_all_ranks() -> None:
    part, machine = packed([900, 300, 80, 41], 4, 512), hardware("h200x2")
    loads = loads_of(part, machine, SHAPE)
    assert all((of_ranks >= -1e-12).all() for of_ranks in loads.values())
    np.testing.assert_allclose(sum(loads.values()), part.seconds(machine, SHAPE), rtol=1e-12)
    np.testing.assert_allclose(
        loads["exposed: messages and copies"].max(), part.plan.cost(machine, SHAPE).exposed_s, rtol=1e-12
    )


def test_the_ideal_is_an_equal_share() -> None:
    """On one rank without messages: the pairs of both documents and their tokens."""
    alone, shared = packed([60, 40], 1, 100), packed([60, 40], 4, 25)
    machine = hardware("h200x2")
    whole = ideal_seconds(alone, machine, SHAPE)
    assert ideal_seconds(shared, machine, SHAPE) == pytest.approx(whole / 4, rel=1e-12)
    assert whole < alone.seconds(machine, SHAPE)  # which has launches


def test_the_longest_documents_have_colours_of_their_own() -> None:
    lengths = [10 + i for i in range(20)]
    part = packed(lengths, 4, 200)
    colours = dict(zip(part.lengths, document_colours(part), strict=True))
    assert [colours[n] for n in sorted(lengths, reverse=True)[:12]] == list(DOCUMENT_COLOURS)
    assert len(set(DOCUMENT_COLOURS)) == 12
    assert {colours[n] for n in sorted(lengths)[:8]} == set(OTHER_DOCUMENTS)


@pytest.mark.parametrize(
    ("lengths", "world", "machine"),
    [([90, 30, 8], 4, "h200x2"), ([7], 1, "h200x8"), ([40] * 20, 5, "h200x8"), ([300, *[9] * 30], 18, "h200x1")],
    ids=["two nodes", "one rank", "one node", "many nodes"],
)
def test_any_microbatch_can_be_drawn(lengths: list[int], world: int, machine: str, tmp_path: Path) -> None:
    image, colors = pytest.importorskip("matplotlib.image"), pytest.importorskip("matplotlib.colors")
    path = tmp_path / "part.png"
    draw_batch(path, packed(lengths, world, 200, machine), hardware(machine), SHAPE)
    drawn = image.imread(path)[..., :3].reshape(-1, 3)
    # the longest document, and the loads: more pixels than the legends have
    for colours in (DOCUMENT_COLOURS[:1], LOAD_COLOURS.values()):
        assert sum(int((abs(drawn - colors.to_rgb(x)).max(axis=1) < 0.01).sum()) for x in colours) > 20_000


def test_the_command_draws_the_first_batch_of_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No document is longer than a fixed group of ranks holds, although all ranks together hold more."""
    pytest.importorskip("matplotlib")
    drawn: list[rs.Microbatch] = []

    def note(path: Path, part: rs.Microbatch, *others: Any) -> None:
        drawn.append(part)

    monkeypatch.setattr(command, "draw_batch", note)
    sizes = ["--lengths", "long tail", "--world", "32", "--tokens-per-rank", "64", "--rounds", "1"]
    assert main(["bench", "pack", *sizes, "--png", str(tmp_path / "bench.png"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == len(WAYS)
    (part,) = drawn
    assert max(part.lengths) == rows[0]["longest"] == 16 * 64
