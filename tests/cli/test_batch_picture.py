"""The picture of a packed batch is drawn, and its bytes between nodes are those of the plans."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringspan as rs
from ringspan.bench.packing import WAYS
from ringspan.cli.batch_picture import draw_batch, node_bytes
from ringspan.cli.main import main
from ringspan.costs.hardware import hardware

SHAPE = rs.Shape(heads=4, kv_heads=2, head_dim=8)


def test_bytes_between_nodes() -> None:
    """Two ranks on two nodes, and a document that is cut in the middle: the later half needs the keys of the first.

    Forward, 4 rows of 2 heads × (8 + 8) numbers of 2 bytes. Backward, these again, and their gradients in float32.
    """
    (part,) = rs.pack([8], 2, tokens_per_rank=4)
    plan = rs.plan(part.mask, world=2, layout="contiguous", strategy="exchange")
    part = rs.Microbatch(documents=part.documents, lengths=part.lengths, plan=plan)
    found = node_bytes(part, hardware("h200x1"), SHAPE)
    assert found.tolist() == [[0, 2 * 4 * 2 * 16 * 2], [4 * 2 * 16 * 4, 0]]


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (part,) = rs.pack([90, 30, 8], 4, tokens_per_rank=32, shape=SHAPE)
    draw_batch(tmp_path / "part.png", part, hardware("h200x2"), SHAPE)
    assert (tmp_path / "part.png").read_bytes().startswith(b"\x89PNG")
    path = tmp_path / "bench.png"
    arguments = ["--lengths", "web", "--world", "4", "--tokens-per-rank", "256", "--rounds", "1", "--png", str(path), "--json"]
    assert main(["bench", "pack", *arguments]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(WAYS)
    assert path.exists()
