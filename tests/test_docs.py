"""The examples of docs/training.md run unchanged, one after the other, on four processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.conftest import Pools

PAGE = Path(__file__).parent.parent / "docs" / "training.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def run_all(rank: int, blocks: list[str]) -> dict[str, Any]:
    torch.manual_seed(rank // 2)  # the ranks of a replica need the same sequence and parameters
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
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
