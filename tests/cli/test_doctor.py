"""``ringspan doctor`` lists what is available, and why kernels are not chosen."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.cli import doctor
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
    for_cuda = dict.fromkeys(("fa4", "cudnn", "flash", "efficient", "flex", "flex_flash"), "serves CUDA devices, not cpu")
    assert cpu["why_not"] == {**for_cuda, "eager": "is taken only if there is a score_mod or a mask_mod"}
    assert cpu["lacks"] == {}


def kernel(device: str, dtype: str, chosen: str, lacks: dict[str, str] | None = None, **why_not: str) -> dict[str, Any]:
    dims = {"head_dim": 128, "v_dim": 64}
    return {"device": device, "dtype": dtype, **dims, "chosen": chosen, "why_not": why_not, "lacks": lacks or {}}


ON_A_CPU = {
    "ringspan": "1",
    "torch": "2",
    "python": "3",
    "triton": True,
    "transports": ["in process", "gloo"],
    "sdpa_flash": {"current": None, "available": [], "missing": {}},
    "devices": {"cpu": "x86_64"},
    "kernels": [kernel("cpu", dtype, "cpu", fa4="serves CUDA", flash="serves CUDA") for dtype in ("bfloat16", "float32")],
    "loopback": {"works": True, "text": "two processes agree", "seconds": 1.0},
}
ON_A_GPU = {
    **ON_A_CPU,
    "transports": ["in process", "gloo", "nccl"],
    "devices": {"cuda:0": "H200"},
    "kernels": [
        kernel("cuda:0", "bfloat16", "flash", lacks={"fa4": "flash-attn-4"}, fa4="is in whatever words"),
        kernel("cuda:0", "float32", "efficient", fa4="is for float16", flash="is for float16"),
    ],
}


@pytest.mark.parametrize(
    ("found", "summary"),
    [
        (
            ON_A_CPU,
            [
                "will use  cpu (x86_64), bfloat16 and float32: kernel cpu",
                "          gloo between processes",
                "missing   a CUDA device: without one attention is computed on the CPU",
            ],
        ),
        (
            ON_A_GPU,
            [
                "will use  cuda:0 (H200), bfloat16: kernel flash",
                "          cuda:0 (H200), float32: kernel efficient",
                "          gloo or nccl between processes",
                "missing   flash-attn-4, for the kernel fa4: pip install flash-attn-4",
            ],
        ),
        (
            {**ON_A_GPU, "transports": ["in process", "gloo"], "kernels": ON_A_GPU["kernels"][1:]},
            [
                "will use  cuda:0 (H200), float32: kernel efficient",
                "          gloo between processes",
                "missing   nccl, for several GPUs: this PyTorch was built without it",
            ],
        ),
        (
            {**ON_A_GPU, "kernels": ON_A_GPU["kernels"][1:]},
            [
                "will use  cuda:0 (H200), float32: kernel efficient",
                "          gloo or nccl between processes",
                "missing   nothing",
            ],
        ),
    ],
    ids=["cpu", "gpu", "gpu without nccl", "gpu with everything"],
)
def test_the_summary_comes_first(
    found: dict[str, Any], summary: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: found)
    assert main(["doctor"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n\n")
    assert first.splitlines() == summary
    assert rest.startswith("ringspan 1, torch 2, Python 3\n")


def test_what_is_said_of_several_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--v-dim", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "cpu, bfloat16 and float32, head dim 128/64: kernel cpu" in lines
    assert "  not fa4, cudnn, flash, efficient, flex, flex_flash: serves CUDA devices, not cpu" in lines


@pytest.mark.parametrize(
    ("is_installed", "line"),
    [
        (True, 'sdpa flash  the one of PyTorch is active; FA4 can be activated with rs.activate("FA4")'),
        (False, "sdpa flash  the one of PyTorch is active; FA4 is not installed: pip install flash-attn-4"),
    ],
)
def test_what_plain_attention_runs_and_could_run(
    is_installed: bool, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fa4, "is_installed", lambda: is_installed)
    here = doctor.examine(128, 128, ["float32"], timeout=60)["sdpa_flash"]
    monkeypatch.setattr(doctor, "examine", lambda *_: {**ON_A_GPU, "sdpa_flash": here})
    assert main(["doctor"]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_of_what_needs_a_gpu_nothing_is_said_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: ON_A_CPU)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "sdpa flash" not in said
    assert "merging" not in said
    assert said.splitlines()[-1].startswith('backend="reference"')
