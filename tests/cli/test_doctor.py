"""The doctor says what is there, and why what is not chosen is not."""

from __future__ import annotations

import json

import pytest
import torch

import ringspan as rs
from ringspan.cli.main import main
from ringspan.kernels import fa4


def test_on_a_cpu_the_cpu_kernel_is_chosen_and_the_others_say_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--dtype", "float32", "--head-dim", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    assert "gloo" in found["transports"]
    assert found["sdpa_flash"]["current"] is None
    assert found["sdpa_flash"]["available"] == rs.available()
    cpu = found["kernels"][0]
    assert (cpu["device"], cpu["dtype"], cpu["chosen"]) == ("cpu", "float32", "cpu")
    for_cuda = dict.fromkeys(("fa4", "cudnn", "flash", "efficient", "flex"), "serves CUDA devices, not cpu")
    assert cpu["why_not"] == {**for_cuda, "eager": "is for score_mod and mask_mod, which there are none of"}


def test_the_text_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--v-dim", "64"]) == 0
    text = capsys.readouterr().out
    assert "cpu, bfloat16, head dim 128/64: kernel cpu" in text
    assert "  fa4 serves CUDA devices, not cpu" in text


@pytest.mark.parametrize(
    ("is_installed", "line"),
    [
        (True, 'sdpa flash  the one of PyTorch is active; FA4 is one rs.activate("FA4") away'),
        (False, "sdpa flash  the one of PyTorch is active; FA4 is not installed: pip install flash-attn-4"),
    ],
)
def test_what_plain_attention_runs_and_could_run(
    is_installed: bool, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fa4, "is_installed", lambda: is_installed)
    assert main(["doctor"]) == 0
    assert line in capsys.readouterr().out.splitlines()
