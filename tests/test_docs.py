"""The examples of docs/training.md and docs/batches.md run unchanged, one after the other, on four processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.conftest import Pools

DOCS = Path(__file__).parent.parent / "docs"


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


BLOCKS = blocks_of("training.md")


def run_all(rank: int, blocks: list[str]) -> dict[str, Any]:
    torch.manual_seed(rank // 2)  # the ranks of a replica need the same sequence and parameters
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "training.md", "exec"), names)
    gradients = [p.grad for p in names["model"].parameters()]
    return {
        "loss": names["loss"].item(),
        "out": isinstance(names["out"], DTensor) and tuple(names["out"].shape),
        "gradients": all(isinstance(g, DTensor) and bool(g.to_local().isfinite().all()) for g in gradients),
    }


def test_the_examples_of_training_md_run(pools: Pools) -> None:
    first, *others = pools(4).run(run_all, BLOCKS)
    assert len(BLOCKS) == 12
    assert first["out"] == (2, 4, 531, 8)
    assert first["gradients"]
    assert first["loss"] == pytest.approx(5.5, abs=1.5)  # an untrained model of 256 tokens: log(256)
    assert all(other == first for other in others)


def run_batches(rank: int, blocks: list[str]) -> dict[str, float]:
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "batches.md", "exec"), names)
    return {name: value.item() for name, value in names.items() if name.endswith("_loss")}


def test_the_examples_of_batches_md_run(pools: Pools) -> None:
    first, *others = pools(4).run(run_batches, blocks_of("batches.md"))
    assert first.keys() == {"tree_loss"}
    assert all(loss == pytest.approx(5.5, abs=1.5) for loss in first.values())  # an untrained model of 256 tokens: log(256)
    assert all(other == first for other in others)
