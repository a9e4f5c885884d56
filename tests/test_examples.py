"""The programs of examples/ run as they stand, and what they print is near nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.torchrun import torchrun

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_ring_sdpa() -> None:
    printed = torchrun(EXAMPLES / "ring_sdpa.py", 2)
    apart = [float(x) for x in re.findall(r"\d\.\de[-+]\d\d", printed)]
    assert len(apart) == 8 * 4 + 1
    assert max(apart) < 2e-5  # float32, summed over a thousand tokens


def test_flex_cp() -> None:
    printed = torchrun(EXAMPLES / "flex_cp.py", 4)
    lines = dict(re.findall(r"^(\w+) over 4 ranks, relative to one device: (.*)$", printed, flags=re.MULTILINE))
    assert set(lines) == {"causal", "documents"}
    for figures in lines.values():
        apart = {what: float(x) for what, x in re.findall(r"(\w+) ([\d.e+-]+)", figures)}
        assert list(apart) == ["out", "dq", "dk", "dv", "dbias"]
        assert apart["out"] <= 2e-6
        assert max(apart.values()) <= 1e-5


def test_finetune_hf() -> None:
    pytest.importorskip("transformers")
    printed = torchrun(EXAMPLES / "finetune_hf.py", 2, "--check")
    losses = [float(x) for x in re.findall(r"^step \d: loss ([\d.]+)$", printed, flags=re.MULTILINE)]
    assert len(losses) == 4
    apart = re.findall(r"^largest difference from one process: (.*)$", printed, flags=re.MULTILINE)
    assert float(apart[0]) <= 1e-5


def test_grpo_step() -> None:
    printed = torchrun(EXAMPLES / "grpo_step.py", 2)
    fewer = [float(x) for x in re.findall(r"([\d.]+)x fewer", printed)]
    assert fewer == [4.5, 3.24]
    apart = [abs(float(x)) for x in re.findall(r"([-\d.]+e[-+]\d\d) apart", printed)]
    assert len(apart) == 2
    assert max(apart) < 1e-12
