"""Questions to ``ringspan plan`` that several test files ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

import ringspan as rs
from ringspan.cli.main import main
from ringspan.cli.plan.study import Question
from ringspan.costs import HARDWARE

SHAPE = rs.Shape(heads=8, kv_heads=2, head_dim=64)
TENSORS = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64")


def question(mask: rs.Mask, world: int, **options: Any) -> Question:
    return Question(mask=mask, world=world, machine=HARDWARE["h200"], shape=SHAPE, **options)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
