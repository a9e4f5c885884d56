"""The doctor says what is there, and why what is not chosen is not."""

from __future__ import annotations

import json

import pytest
import torch

from ringspan.cli.main import main


def test_on_a_cpu_the_cpu_kernel_is_chosen_and_the_others_say_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--dtype", "float32", "--head-dim", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    assert "gloo" in found["transports"]
    cpu = found["kernels"][0]
    assert (cpu["device"], cpu["dtype"], cpu["chosen"]) == ("cpu", "float32", "cpu")
    assert cpu["why_not"] == dict.fromkeys(("fa4", "cudnn", "flash", "efficient"), "serves CUDA devices, not cpu")


def test_the_text_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--v-dim", "64"]) == 0
    text = capsys.readouterr().out
    assert "cpu, bfloat16, head dim 128/64: kernel cpu" in text
    assert "  fa4 serves CUDA devices, not cpu" in text
