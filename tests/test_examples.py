"""The programs of examples/ run as they stand, and what they print is near nothing."""

from __future__ import annotations

import re
from importlib.util import find_spec
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


def test_sft_trl() -> None:
    pytest.importorskip("trl")
    together, alone = (losses_of(torchrun(EXAMPLES / "sft_trl.py", processes)) for processes in (2, 1))
    assert list(alone) == [0, 1, 2, 3]
    for step, loss in alone.items():
        assert abs(loss - together[step]) <= 1e-5


def test_grpo_step() -> None:
    printed = torchrun(EXAMPLES / "grpo_step.py", 2)
    fewer = [float(x) for x in re.findall(r"([\d.]+)x fewer", printed)]
    assert fewer == [4.5, 3.24]
    apart = [abs(float(x)) for x in re.findall(r"([-\d.]+e[-+]\d\d) apart", printed)]
    assert len(apart) == 2
    assert max(apart) < 1e-12


def losses_of(printed: str) -> dict[int, float]:
    return {int(step): float(x) for step, x in re.findall(r"^step (\d): loss ([\d.]+)$", printed, flags=re.MULTILINE)}


def test_train_long(tmp_path: Path) -> None:
    """Two replicas of two ranks against one process; then a run that is interrupted and resumed, with a trace."""
    program, common = EXAMPLES / "train_long.py", ["--cp", "2", "--tokens", "203"]
    printed = torchrun(program, 4, *common, "--check")
    apart = re.findall(r"^largest difference from one process: (.*)$", printed, flags=re.MULTILINE)
    assert float(apart[0]) <= 1e-5
    whole = losses_of(printed)
    assert list(whole) == [0, 1, 2, 3]
    assert whole[3] < whole[0]

    saved = ["--save", str(tmp_path / "saved"), "--trace", str(tmp_path / "step")]
    has_tensorboard = find_spec("tensorboard") is not None
    saved += ["--tensorboard", str(tmp_path / "curve")] if has_tensorboard else []
    first = losses_of(torchrun(program, 4, *common, *saved, "--steps", "2"))
    rest = losses_of(torchrun(program, 4, *common, *saved, "--steps", "4"))
    assert (list(first), list(rest)) == ([0, 1], [2, 3])
    for step, loss in {**first, **rest}.items():
        assert abs(loss - whole[step]) <= 2e-6
    for rank in range(4):
        assert "ringspan" in (tmp_path / f"step.{rank}.json").read_text()
    curve = {}
    for file in (tmp_path / "curve").glob("events.*"):
        curve.update(losses_of_events(file))
    assert not has_tensorboard or curve == pytest.approx(whole, abs=2e-6)


def losses_of_events(file: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(file)).Reload()
    return {x.step: x.value for tag in found.Tags()["scalars"] for x in found.Scalars(tag) if "loss" in tag}
